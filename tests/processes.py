"""Runs Python programs in processes of their own, with the DeepSpeed of this environment."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def environment(path: Path | None = None, **variables: str) -> dict[str, str]:
    """The environment of this process without its ZEROFIX settings, plus `variables`.

    `path` comes first on the module path.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ZEROFIX")}
    paths = [str(p) for p in (path, ROOT) if p] + [os.environ.get("PYTHONPATH", "")]
    return clean | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(paths)} | variables


def python(
    program: str, *arguments: str, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program text; what it prints and its exit code are in the result."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env=environment(path, **variables),
        capture_output=True,
        text=True,
        timeout=300,
    )


def answer(program: str, path: Path | None = None, **variables: str) -> Any:
    """Run a program that ends well and prints JSON as its last line; return that."""
    done = python(program, path=path, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# A program that prints what became of the fixes: states, and whether the edited code is in force.
TELL = """
import json
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Z
status = zerofix.status()
print(json.dumps({
    "states": {f.name: f.state.value for f in status.fixes},
    "reasons": {f.name: f.reason for f in status.fixes},
    "edited": "partial_sums_in_cpu" in Z.reset_cpu_buffers.__code__.co_names,
    "deepspeed": status.deepspeed,
    "ok": status.ok,
}))
"""
