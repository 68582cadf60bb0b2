"""The training process's end of the worker."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from pathlib import Path

from zerofix.superoffload.memory import Memory
from zerofix.superoffload.worker import Setup, Task


class Client:
    """Starts a worker, gives it tasks and waits for them."""

    def __init__(self, memory: Memory, setup: Setup, cores: float) -> None:
        """Start the worker.

        Args:
            cores: the part of the cores of this process that the worker gets.
        """
        self._memory = memory
        self._connection, theirs = Pipe()
        self._submitted = self._done = 0
        # A process that runs nothing of the user's script: multiprocessing would import it, and
        # without a __main__ guard train once more.
        program = (
            f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; "
            "from zerofix.superoffload.worker import serve; "
            f"serve({theirs.fileno()}, {memory.file})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            # It runs no training: there is nothing to repair, and nothing to tell.
            env=os.environ | {"ZEROFIX": "0"},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), memory.file),
        )
        # From here on the worker alone holds it: its end is then the end of the connection.
        theirs.close()
        memory.close_file()
        self._cores = _Cores(self._process.pid, cores)
        self._send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, task: Task) -> int:
        """Give the worker a task, to be done after those before; its number is returned.

        Raises:
            RuntimeError: the worker has ended; its exception or exit code is in the message.
        """
        # Answers that nobody takes would fill the connection and stop the worker.
        while self._connection.poll():
            self._receive()
        self._submitted += 1
        self._send((self._submitted, task))
        return self._submitted

    def wait(self, number: int) -> None:
        """Wait until the task of this number is done, however long it takes.

        Raises:
            RuntimeError: the worker has ended; its exception or exit code is in the message.
        """
        while self._done < number:
            self._receive()

    def cancel(self) -> None:
        """Pass over the tasks that the worker has not begun, and wait for the one that it has."""
        self._memory.cancelled.fill_(self._submitted)
        self.wait(self._submitted)

    def close(self) -> None:
        """End the worker and give this process its cores back."""
        self._connection.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._cores.restore()

    def _send(self, message: object) -> None:
        try:
            # Not as multiprocessing pickles tensors, such as a learning rate, to share them.
            self._connection.send_bytes(pickle.dumps(message))
        except ConnectionError:
            while True:  # what the worker said before its end, up to what ended it
                self._receive()

    def _receive(self) -> None:
        try:
            trace = self._connection.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait()
            raise RuntimeError(
                f"the worker process of SuperOffload (pid {self.pid}) ended with exit code {code}"
                + (" (killed: out of memory?)" if code == -9 else "")
            ) from None
        if trace is not None:
            raise RuntimeError(f"the worker process of SuperOffload failed:\n{trace}")
        self._done += 1


class _Cores:
    """Who may run on which cores, as SuperOffload divides them."""

    def __init__(self, worker: int, share: float) -> None:
        self._all = os.sched_getaffinity(0)
        ordered = sorted(self._all)
        split = int((1 - share) * len(ordered))
        self._ours: Sequence[int] = ordered[:split]
        if self._ours:
            # A worker that has ended already tells why when it is asked; some systems forbid it.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(worker, ordered[split:])
                os.sched_setaffinity(0, self._ours)

    def restore(self) -> None:
        if not self._ours:
            return
        # Threads that came since have the cores of the thread that made them.
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if os.sched_getaffinity(int(thread.name)) == set(self._ours):
                    os.sched_setaffinity(int(thread.name), self._all)
