"""Runs Python programs in processes of their own, with the DeepSpeed of this environment."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
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


class World:
    """A group of processes, one a rank, in which a function answers one request after another.

    It is called with a folder that has request.json; rank 0 writes answer.json. ``patched`` leaves
    it to import zerofix as a user would; otherwise ``ZEROFIX=0`` turns it off.
    """

    def __init__(self, worker: Callable[[Path], None], size: int, *, patched: bool) -> None:
        self._worker = worker
        self._folder = tempfile.TemporaryDirectory()
        self._requests = 0
        self._ranks: dict[Any, Any] = {}
        """Pipe to process."""
        variables = {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        variables |= {} if patched else {"ZEROFIX": "0"}
        for rank in range(size):
            own = environment(None, **variables, RANK=str(rank), LOCAL_RANK=str(rank))
            log = Path(self._folder.name, f"{rank}.log")
            here, there = multiprocessing.Pipe()
            process = SERVER.Process(target=_rank, args=(worker, there, log, own))
            process.start()
            there.close()  # so that its end is seen
            self._ranks[here] = process

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in self._ranks.items():
            process.kill()
            process.join()
            pipe.close()
        self._folder.cleanup()

    def ask(self, request: Any, timeout: float) -> Any:
        """The answer to a request. After an error no more can be asked.

        Raises RuntimeError where a rank ends, ``subprocess.TimeoutExpired`` after ``timeout``
        seconds.
        """
        self._requests += 1
        folder = Path(self._folder.name, str(self._requests))
        folder.mkdir()
        (folder / "request.json").write_text(json.dumps(request))
        for pipe in self._ranks:
            with contextlib.suppress(OSError):  # of a rank that has ended
                pipe.send(folder)
        end = time.monotonic() + timeout
        waiting = dict(self._ranks)
        while waiting:
            ready = wait(waiting, max(0, end - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired(self._worker.__module__, timeout)
            for pipe in ready:
                process = waiting.pop(pipe)
                try:
                    pipe.recv()
                except (EOFError, OSError):
                    process.join()
                    tails = "\n".join(log[-3000:] for log in self.logs())
                    raise RuntimeError(f"a rank ended with {process.exitcode}:\n{tails}") from None
        return json.loads((folder / "answer.json").read_text())

    def logs(self) -> list[str]:
        """What each rank has written to stdout and stderr so far."""
        return [Path(self._folder.name, f"{k}.log").read_text() for k in range(len(self._ranks))]


def ask(
    worker: Callable[[Path], None], request: Any, world_size: int, *, patched: bool, timeout: float
) -> Any:
    """What a ``World`` of its own answers to one request."""
    with World(worker, world_size, patched=patched) as world:
        return world.ask(request, timeout)


def _rank(
    worker: Callable[[Path], None], pipe: Connection, log: Path, variables: dict[str, str]
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(variables)
    while True:
        worker(pipe.recv())
        pipe.send(None)


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
