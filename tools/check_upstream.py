"""Says what DeepSpeed has done since zerofix/releases.json was made.

    python tools/check_upstream.py FOLDER

FOLDER has DeepSpeed's main branch, installed by ``pip install --no-deps --target FOLDER``. Lists
releases that are not in the table, changed bodies, and defects that are gone. The exit code is 1
where there is something to do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from make_releases import OUTPUT, released

from zerofix.gate import State
from zerofix.patches import CATALOGUE


def main(folder: str) -> int:
    known = json.loads(OUTPUT.read_text())["releases"]
    news = [
        f"release {release} is not in the table" for release in released() if release not in known
    ]
    done = subprocess.run(
        [sys.executable, "-m", "zerofix", "verify", "--json"],
        env=os.environ | {"PYTHONPATH": folder},
        stdout=subprocess.PIPE,
        text=True,
    )
    for verdict in json.loads(done.stdout):
        news += told(verdict)
    print(*news or ["nothing new"], sep="\n")
    return 1 if news else 0


def told(verdict: dict[str, Any]) -> list[str]:
    """What is new about one fix, by what `zerofix verify` found of it."""
    name, stock = verdict["fix"], verdict["stock"]
    (fixed,) = [fix.fixed for fix in CATALOGUE if fix.name == name]
    news = []
    if stock is None:
        news.append(f"{name}: its reproduction does not run: {verdict['detail']}")
    elif stock <= verdict["tolerance"] and fixed is None:
        news.append(f"{name}: DeepSpeed has it right ({stock:.1e})")
    elif stock > verdict["tolerance"] and fixed is not None:
        news.append(f"{name}: right since {fixed}, and wrong again ({stock:.1e})")
    if verdict["state"] == State.UNRECOGNISED.value:
        news.append(f"{name}: {verdict['detail']}")
    return news


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
