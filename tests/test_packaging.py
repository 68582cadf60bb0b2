"""The packages that are published: built, checked, and used in a clean environment."""

import json
import os
import subprocess
import sys
import tarfile
import venv
from importlib import metadata
from pathlib import Path

import pytest
from processes import ROOT, environment

import zerofix


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command("build", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_twine_finds_nothing_to_say(packages):
    assert command("twine", "check", "--strict", *packages).count("PASSED") == 2


def test_the_sdist_has_what_is_needed_to_test_it(packages):
    with tarfile.open(packages[0]) as archive:
        names = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= names
    assert {"tests/test_packaging.py", "tools/make_releases.py", "docs/design.md"} <= names


def test_a_wheel_works_beside_deepspeed_in_a_clean_environment(packages, tmp_path):
    """In which all but zerofix is that of this environment."""
    venv.create(tmp_path / "clean", with_pip=False, symlinks=True)
    python = tmp_path / "clean" / "bin" / "python"
    (site,) = (tmp_path / "clean" / "lib").glob("python*/site-packages")
    command("pip", "--python", python, "install", "--no-deps", "--quiet", packages[1])
    others = [p for p in sys.path if "site-packages" in p or Path(p, "deepspeed").is_dir()]
    others = [f"import site; site.addsitedir({p!r})" for p in others if not Path(p).samefile(ROOT)]
    (site / "others.pth").write_text("\n".join(others))
    clean = environment() | {"PYTHONPATH": "", "PATH": f"{python.parent}{os.pathsep}/usr/bin:/bin"}

    def run(*arguments):
        done = subprocess.run(
            arguments, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    place = run("python", "-c", "import zerofix; print(zerofix.__file__)")
    assert place.strip() == str(site / "zerofix" / "__init__.py")
    status = json.loads(run("zerofix", "status", "--json"))
    assert (status["version"], status["ok"]) == (zerofix.__version__, True)
    assert status["deepspeed"] == metadata.version("deepspeed")
    see = "import sys; print(sys.modules['zerofix'].__file__)"
    assert run("zerofix", "run", "--", "python", "-c", see) == place
    assert (site / "zerofix" / "py.typed").exists()
