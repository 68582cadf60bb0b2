"""The docs say what the records and the results say, and make a site."""

import json
import sys

from processes import ROOT

sys.path.append(str(ROOT / "tools"))
import make_docs


def test_what_is_generated_is_up_to_date():
    for path, text in make_docs.pages().items():
        assert path.read_text() == text, f"run tools/make_docs.py: {path} is old"


def test_every_known_release_has_a_result():
    known = json.loads((ROOT / "zerofix" / "releases.json").read_text())["releases"]
    files = {path.name for path in (ROOT / "benchmarks" / "results").glob("verify-*.json")}
    assert files == {f"verify-{release}.json" for release in known}


def test_the_site_has_no_broken_link(tmp_path):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path)))
    assert "symptom" in (tmp_path / "fixes" / "index.html").read_text().lower()
