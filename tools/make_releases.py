"""Writes zerofix/releases.json from the source packages of every DeepSpeed release.

    python tools/make_releases.py [--sdists DIR]

The source packages are downloaded with pip into DIR (default: .sdists) unless they are there.
The same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from pathlib import Path

from packaging.version import Version

from zerofix.fix import Fix
from zerofix.patches import CATALOGUE
from zerofix.source import ABSENT, fingerprint

OLDEST = Version("0.16.0")
OUTPUT = Path(__file__).parent.parent / "zerofix" / "releases.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sdists", type=Path, default=Path(".sdists"))
    directory = parser.parse_args().sdists
    releases = released()
    download(releases, directory)
    paths = sorted({target.path for fix in CATALOGUE for target in fix.targets})
    bodies: dict[str, dict[str, list[str]]] = {path: defaultdict(list) for path in paths}
    for release in releases:
        files = python_files(directory / f"deepspeed-{release}.tar.gz")
        for path in paths:
            bodies[path][body(path, files)].append(release)
    table = {
        "releases": releases,
        "targets": bodies,
        "verdicts": {
            fix.name: {
                target.path: {
                    found: verdict(fix, seen) for found, seen in bodies[target.path].items()
                }
                for target in fix.targets
            }
            for fix in CATALOGUE
        },
    }
    OUTPUT.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{OUTPUT}: {len(releases)} releases, {len(paths)} targets")


def released() -> list[str]:
    """Every release from the oldest supported one on, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "deepspeed"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = re.search(r"Available versions: (.*)", output)
    if line is None:
        raise SystemExit(f"pip lists no versions of deepspeed:\n{output}")
    return [str(v) for v in sorted(map(Version, line[1].split(", "))) if v >= OLDEST]


def download(releases: list[str], directory: Path) -> None:
    for release in releases:
        if not (directory / f"deepspeed-{release}.tar.gz").exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--no-build-isolation", "--no-binary", "deepspeed"]
            subprocess.run([*command, "-d", str(directory), f"deepspeed=={release}"], check=True)


def python_files(sdist: Path) -> dict[str, ast.Module]:
    """Module name to syntax tree, of the modules that hold targets."""
    wanted = {target.module for fix in CATALOGUE for target in fix.targets}
    trees = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            module = member.name.partition("/")[2].removesuffix(".py").replace("/", ".")
            if module in wanted and (file := archive.extractfile(member)):
                trees[module] = ast.parse(file.read())
    return trees


def body(path: str, trees: dict[str, ast.Module]) -> str:
    """The fingerprint of a target's body."""
    module, _, names = path.partition(":")
    node: ast.AST | None = trees.get(module)
    for name in names.split("."):
        definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inside = (
            [n for n in ast.iter_child_nodes(node) if isinstance(n, definitions)] if node else []
        )
        # The last of several definitions is the one that stays.
        node = next((n for n in reversed(inside) if n.name == name), None)
    return fingerprint(node) if node else ABSENT


def verdict(fix: Fix, releases: list[str]) -> str:
    """Whether a body that these releases have is wrong, right or (with others) either."""
    wrong = {
        (fix.introduced is None or Version(release) >= Version(fix.introduced))
        and (fix.fixed is None or Version(release) < Version(fix.fixed))
        for release in releases
    }
    return {frozenset({True}): "wrong", frozenset({False}): "right"}.get(frozenset(wrong), "either")


if __name__ == "__main__":
    main()
