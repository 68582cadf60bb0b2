"""Runs reproductions in processes of their own that find DeepSpeed imported: most of their time.

Started as a file, for zerofix must be imported in those processes only. Reads jobs and writes
results, a line of JSON each.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from typing import Any


def main() -> None:
    sys.path[0] = os.getcwd()  # as `python -m` has it
    import torch

    # After a fork a device cannot be used if it was before, and DeepSpeed's import may.
    devices = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    forks = not any(device.is_available() for device in devices if device)
    if forks:
        with contextlib.redirect_stdout(sys.stderr):
            import deepspeed  # noqa: F401
        gc.freeze()  # an engine collects garbage some ten times, and would go through all of this
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryFile("w+") as output:
            code = (_fork if forks else _start)(job, output)
            output.seek(0)
            print(json.dumps({"code": code, "output": output.read()}), flush=True)


def _fork(job: dict[str, Any], output: Any) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=_run, args=(job, output.fileno()))
    process.start()
    process.join(job["timeout"])
    code = process.exitcode
    process.kill()
    process.join()
    return code


def _run(job: dict[str, Any], output: int) -> None:
    for standard in (1, 2):
        os.dup2(output, standard)
    os.environ.clear()
    os.environ.update(job["environ"])
    sys.argv[1:] = [job["name"]]
    runpy.run_module("zerofix.repro", run_name="__main__")


def _start(job: dict[str, Any], output: Any) -> int | None:
    command = [sys.executable, "-m", "zerofix.repro", job["name"]]
    try:
        return subprocess.run(
            command,
            env=job["environ"],
            stdout=output,
            stderr=output,
            timeout=job["timeout"],
        ).returncode
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    main()
