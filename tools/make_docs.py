"""Writes docs/fixes.md, docs/releases.md and tables in README.md and docs/frameworks.md.

From the records in zerofix/patches and the results of `zerofix verify` on every release:

.venv/bin/nox -s verify -- --write     # benchmarks/results/verify-RELEASE.json
.venv/bin/python benchmarks/frameworks.py
.venv/bin/python tools/make_docs.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.version import Version

import zerofix
from zerofix.fix import Fix
from zerofix.patches import CATALOGUE
from zerofix.settings import toggle

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- made by tools/make_docs.py -->", "<!-- end -->"
REPAIRED = "repaired"

Verdicts = Mapping[str, Mapping[str, Any]]
"""Release to what `zerofix verify` found of one fix there, the oldest release first."""


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


def pages() -> dict[Path, str]:
    """What is generated: file to its whole text."""
    results = [json.loads(file.read_text()) for file in ROOT.glob("benchmarks/results/verify-*")]
    results.sort(key=lambda result: Version(result["deepspeed"]))
    found: dict[str, dict[str, Any]] = {fix.name: {} for fix in CATALOGUE}
    for result in results:
        for verdict in result["verdicts"]:
            found[verdict["fix"]][result["deepspeed"]] = verdict
    written = {ROOT / "README.md": summary(found), ROOT / "docs" / "frameworks.md": frameworks()}
    return {path: between(path.read_text(), made) for path, made in written.items()} | {
        ROOT / "docs" / "fixes.md": fixes(found),
        ROOT / "docs" / "releases.md": releases(found),
    }


def between(text: str, made: str) -> str:
    """A text with what is made between the marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}"


def frameworks() -> str:
    result = json.loads((ROOT / "benchmarks" / "results" / "frameworks.json").read_text())
    rows = [["framework", "stock", "`import zerofix`"]]
    for name, errors in result["errors"].items():
        rows.append([name, f"{errors['stock']:.1e}", f"{errors['zerofix']:.1e}"])
    names = ("deepspeed", "transformers", "accelerate", "lightning")
    versions = ", ".join(f"{name} {result[name]}" for name in names)
    return f"{table(rows)}\n\nOne rank on a CPU, with {versions}."


def summary(found: Mapping[str, Verdicts]) -> str:
    rows = [["fix", "repaired on", "stock, at most", "with zerofix, at most"]]
    for name, verdicts in found.items():
        errors = [f"{worst(verdicts, kind):.1e}" for kind in ("stock", "patched")]
        rows.append([f"[`{name}`](docs/fixes.md#{name})", spans(verdicts)[REPAIRED], *errors])
    return table(rows)


def releases(found: Mapping[str, Verdicts]) -> str:
    rows = [["release", *(f"[`{name}`](fixes.md#{name})" for name in found)]]
    for release in next(iter(found.values())):
        rows.append([release, *(cell(verdicts[release]) for verdicts in found.values())])
    return f"""# Every release

The error on stock → with zerofix, from `zerofix verify` on each release (one machine, CPU;
`benchmarks/results/verify-*.json`). [Each fix](fixes.md) says what its error is.

{table(rows)}
"""


def fixes(found: Mapping[str, Verdicts]) -> str:
    return "# Each fix\n\n" + "\n".join(section(fix, found[fix.name]) for fix in CATALOGUE)


def section(fix: Fix, verdicts: Verdicts) -> str:
    said = spans(verdicts)
    last = list(verdicts.values())[-1]
    pairs = zip(fix.upstream, zerofix.status()[fix.name].links, strict=True)
    links = [f"[{number}]({link})" for number, link in pairs]
    rest = [f"{word} on {where}" for word, where in said.items() if word != REPAIRED]
    parts = {
        "Symptom": fix.symptom,
        "Cause": fix.cause,
        "Releases": "; ".join([f"{REPAIRED} on {said[REPAIRED]}", *rest]) + ".",
        "Numbers": f"{last['measures']}: at most {worst(verdicts, 'stock'):.1e} on stock, "
        f"{worst(verdicts, 'patched'):.1e} with zerofix (tolerance {last['tolerance']:.0e}).",
        "Check": f"`zerofix verify {fix.name}` measures it on the DeepSpeed that is installed; "
        "`zerofix audit ds_config.json` tells whether a configuration meets it.",
        "Switch": f"`{toggle(fix.name)}=0` turns it off.",
        "Limits": fix.limits,
        "Upstream": ", ".join(links),
    }
    lines = [f"**{name}.** {text}\n" for name, text in parts.items() if text]
    return "\n".join([f"## {fix.name}\n", f"{fix.title[0].upper()}{fix.title[1:]}.\n", *lines])


def cell(verdict: Mapping[str, Any]) -> str:
    if verdict["verdict"] == REPAIRED:
        return f"{verdict['stock']:.1e} → {verdict['patched']:.1e}"
    return word_of(verdict)


def word_of(verdict: Mapping[str, Any]) -> str:
    needed = verdict["verdict"] != "not needed"
    return str(verdict["verdict"] if needed else verdict["state"].replace("-", " "))


def worst(verdicts: Verdicts, kind: str) -> float:
    """The largest error of a kind on the releases that are repaired."""
    return max(each[kind] for each in verdicts.values() if each["verdict"] == REPAIRED)


def spans(verdicts: Verdicts) -> dict[str, str]:
    """What is said of releases, and of which: neighbours are one span."""
    said: dict[str, list[str]] = {}
    for word, group in groupby(verdicts, key=lambda release: word_of(verdicts[release])):
        same = list(group)
        said.setdefault(word, []).append(same[0] + f" to {same[-1]}" * (len(same) > 1))
    return {word: ", ".join(parts) for word, parts in said.items()}


def table(rows: list[list[str]]) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


if __name__ == "__main__":
    main()
