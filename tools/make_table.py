"""Writes the table of releases, in docs/releases.md and README.md, from benchmarks/results.

.venv/bin/nox -s verify -- --write     # the result files, of every release or of some
.venv/bin/python tools/make_table.py
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- made by tools/make_table.py -->", "<!-- end -->"
WORDS = {"fixed-upstream": "fixed upstream", "not-affected": "not affected"}

Verdicts = dict[str, dict[str, Any]]
"""Fix to what `zerofix verify` found."""


def main() -> None:
    releases = read()
    for file, table in (("docs/releases.md", details(releases)), ("README.md", summary(releases))):
        path = ROOT / file
        path.write_text(put(path.read_text(), table))


def put(text: str, table: str) -> str:
    """The text with this table in the place of the last one."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def read() -> dict[str, Verdicts]:
    """Release to its verdicts, the oldest release first."""
    found = {}
    for file in RESULTS.glob("verify-*.json"):
        result = json.loads(file.read_text())
        found[result["deepspeed"]] = {each["fix"]: each for each in result["verdicts"]}
    return {release: found[release] for release in sorted(found, key=Version)}


def details(releases: dict[str, Verdicts]) -> str:
    """A row for each release, a column for each fix."""
    fixes = list(next(iter(releases.values())))
    rows = [["release", *(f"`{fix}`" for fix in fixes)], ["---"] * (1 + len(fixes))]
    rows += [[release, *(cell(found[fix]) for fix in fixes)] for release, found in releases.items()]
    return lines(rows)


def cell(verdict: dict[str, Any]) -> str:
    if verdict["verdict"] == "repaired":
        return f"{verdict['stock']:.1e} → {verdict['patched']:.1e}"
    if verdict["verdict"] == "not needed":
        return WORDS[verdict["state"]]
    return f"**{verdict['verdict']}**"


def summary(releases: dict[str, Verdicts]) -> str:
    """A row for each fix: in which of the releases it is needed, and the worst it repairs."""
    rows = [["fix", "repaired", "largest error: stock", "with zerofix", "else"], ["---"] * 5]
    for fix in next(iter(releases.values())):
        verdicts = {release: found[fix] for release, found in releases.items()}
        repaired = [each for each in verdicts.values() if each["verdict"] == "repaired"]
        said = {release: cell(each) for release, each in verdicts.items()}
        said |= {r: "repaired" for r, each in verdicts.items() if each["verdict"] == "repaired"}
        ranges = {word: spans(said, word) for word in dict.fromkeys(said.values())}
        rows.append(
            [
                f"`{fix}`",
                ranges.pop("repaired", ""),
                *(
                    f"{max((each[kind] for each in repaired), default=0.0):.1e}"
                    for kind in ("stock", "patched")
                ),
                "; ".join(f"{word}: {where}" for word, where in ranges.items()) or "",
            ]
        )
    return lines(rows)


def spans(said: dict[str, str], word: str) -> str:
    """The releases of which this is said, neighbours as one span."""
    parts = []
    for key, group in groupby(said, key=lambda release: said[release]):
        releases = list(group)
        if key == word:
            parts.append(releases[0] + (f" to {releases[-1]}" if len(releases) > 1 else ""))
    return ", ".join(parts)


def lines(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    main()
