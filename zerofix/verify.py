"""Runs the reproductions, on stock DeepSpeed and with zerofix, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofix.gate import State
from zerofix.patches import CATALOGUE
from zerofix.settings import toggle

RESULT = "zerofix result: "
"""What the line with the result begins with."""
TIMEOUT = 900
"""Seconds for a reproduction; DeepSpeed may have to compile an operation first."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""A reproduction is a job of its own, of one process."""
NOT_NEEDED = (State.FIXED_UPSTREAM.value, State.NOT_AFFECTED.value)


@dataclass(frozen=True)
class Verdict:
    """The result of one reproduction."""

    fix: str
    measures: str
    stock: float | None
    """Error on stock DeepSpeed; None when the program did not end well."""
    patched: float | None
    """Error with zerofix."""
    tolerance: float
    state: str
    deepspeed: str
    verdict: str
    ok: bool
    detail: str = ""
    """What went wrong, where something did."""


def verify(names: Iterable[str]) -> Iterator[Verdict]:
    """Run the reproductions of these fixes, one after the other."""
    with _server() as left, _server() as right, ThreadPoolExecutor(2) as pool:
        for name in names:
            stock = pool.submit(_run, left, name, {"ZEROFIX": "0"})
            wanted = {toggle(name): os.environ.get(toggle(name), "1")}
            patched = pool.submit(_run, right, name, _twins_off(name) | wanted)
            yield _judge(name, stock.result(), patched.result())


def _twins_off(name: str) -> dict[str, str]:
    """Toggles of the fixes that change the same functions: they would hide that this one fails."""
    targets = {fix.name: {target.path for target in fix.targets} for fix in CATALOGUE}
    return {toggle(other): "0" for other in targets if targets[other] == targets[name]}


@contextmanager
def _server() -> Iterator[subprocess.Popen[str]]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ZEROFIX")}
    command = [sys.executable, str(Path(__file__).parent / "repro" / "_server.py")]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    with suppress(BrokenPipeError), process:  # it may have ended, with a job still unsent
        yield process


def _run(server: subprocess.Popen[str], name: str, toggles: dict[str, str]) -> dict[str, Any]:
    """The result of ``python -m zerofix.repro``; ``{"crash": ...}`` when there is none."""
    assert server.stdin
    assert server.stdout
    assert server.stderr
    dropped = ("ZEROFIX", "ZEROFIX_STRICT", *LAUNCHER)
    environ = {k: v for k, v in os.environ.items() if k not in dropped}
    if toggles.get(toggle(name)) == "0":
        toggles |= {toggle(name): "1"}  # to verify a fix is to want it
    job = {"name": name, "environ": environ | toggles, "timeout": TIMEOUT}
    try:
        print(json.dumps(job), file=server.stdin, flush=True)
        done = json.loads(server.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError):
        return {"crash": f"exit code {server.wait()}: {server.stderr.read().strip()[-2000:]}"}
    if done["code"] is None:
        return {"crash": f"no end within {TIMEOUT} s"}
    lines = done["output"].splitlines()
    result = next((line for line in lines if line.startswith(RESULT)), None)
    if done["code"] or result is None:
        return {"crash": f"exit code {done['code']}: {done['output'].strip()[-2000:]}"}
    told: dict[str, Any] = json.loads(result.removeprefix(RESULT))
    return told


def _judge(name: str, stock: dict[str, Any], patched: dict[str, Any]) -> Verdict:
    known = stock if "crash" not in stock else patched
    tolerance = float(known.get("tolerance", 0.0))
    errors = [float(run["error"]) if "error" in run else None for run in (stock, patched)]
    right = [error is not None and error <= tolerance for error in errors]
    state = patched.get("state", State.FAILED.value)
    detail = "\n".join(
        f"{kind}: {run['crash']}"
        for kind, run in (("stock", stock), ("with zerofix", patched))
        if "crash" in run
    )
    if "crash" in patched or "crash" in stock:
        verdict, ok = "did not run", False
    elif state in NOT_NEEDED:
        verdict, ok = ("not needed", True) if all(right) else ("wrong, and no fix", False)
    elif state != State.APPLIED.value:
        verdict, ok, detail = "not applied", False, patched["reason"]
    elif not right[1]:
        verdict, ok = "still wrong", False
    elif right[0]:
        verdict, ok = "not reproduced", False
    else:
        verdict, ok = "repaired", True
    return Verdict(
        fix=name,
        measures=known.get("measures", ""),
        stock=errors[0],
        patched=errors[1],
        tolerance=tolerance,
        state=state,
        deepspeed=known.get("deepspeed", ""),
        verdict=verdict,
        ok=ok,
        detail=detail,
    )
