"""Writes result files: what was measured, on what, when."""

import datetime
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from zerofix import __version__

FOLDER = Path(__file__).parent / "results"


def write(name: str, measured: dict[str, Any]) -> None:
    """Write ``results/NAME.json`` and print it."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    versions = {"zerofix": __version__} | {p: metadata.version(p) for p in ("deepspeed", "torch")}
    result = {
        "date": datetime.date.today().isoformat(),
        "hardware": f"{len(models)} x {models[0]}" if models else platform.processor(),
        "python": platform.python_version(),
        **versions,
        **measured,
    }
    # JSON has no infinity, and reads this as one.
    text = json.dumps(result, indent=1).replace(": Infinity", ": 1e999")
    (FOLDER / f"{name}.json").write_text(text + "\n")
    print(text)
