"""Runs Python programs in processes of their own, with the DeepSpeed of this environment."""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
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


# Forks of it have torch; DeepSpeed and zerofix they import themselves. Half of a rank's time.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["__main__", "torch._dynamo", "torch._inductor.compile_fx"])


def ask(
    worker: Callable[[Path], None], request: Any, world_size: int, *, patched: bool, timeout: float
) -> Any:
    """Call a function in a group of processes, one a rank, and return its answer.

    It is called with a folder that has request.json; rank 0 writes answer.json. ``patched`` leaves
    it to import zerofix as a user would; otherwise ``ZEROFIX=0`` turns it off. Raises RuntimeError
    where a rank ends early, ``subprocess.TimeoutExpired`` after ``timeout`` seconds.
    """
    variables = {"WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    variables |= {} if patched else {"ZEROFIX": "0"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "request.json").write_text(json.dumps(request))
        ranks = []
        for rank in range(world_size):
            own = environment(None, **variables, RANK=str(rank), LOCAL_RANK=str(rank))
            ranks.append(SERVER.Process(target=_rank, args=(worker, Path(folder), own)))
        for process in ranks:
            process.start()
        end = time.monotonic() + timeout
        try:
            for process in ranks:
                process.join(max(0, end - time.monotonic()))
                if process.is_alive():
                    raise subprocess.TimeoutExpired(worker.__module__, timeout)
        finally:
            for process in ranks:
                process.kill()
        if any(process.exitcode for process in ranks):
            tails = "\n".join(log.read_text()[-3000:] for log in Path(folder).glob("*.log"))
            codes = [process.exitcode for process in ranks]
            raise RuntimeError(f"the ranks ended with {codes}:\n{tails}")
        return json.loads(Path(folder, "answer.json").read_text())


def _rank(worker: Callable[[Path], None], folder: Path, variables: dict[str, str]) -> None:
    log = os.open(folder / f"{variables['RANK']}.log", os.O_WRONLY | os.O_CREAT)
    for output in (1, 2):
        os.dup2(log, output)
    os.environ.clear()
    os.environ.update(variables)
    worker(folder)


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
