"""Notices that ranks had gradients of different parameters."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Agreement:
    """Whether the ranks of one optimizer agree which parameters have a gradient."""

    def __init__(self, group: Any) -> None:
        """For the ranks of ``group``, the process group that reduces the gradients."""
        self._group = group
        self._digest = 0
        self._results: list[tuple[Tensor, Callable[[], Any]]] = []
        """The largest digest and minus the smallest, and what waits for their arrival."""

    def note(self, had_gradient: Sequence[bool]) -> None:
        """Take from a backward which parameters had a gradient, in one order on all ranks."""
        # ZeRO-1 reduces none before the last, and one rank may have more of those than another.
        if any(had_gradient):
            self._digest = zlib.crc32(bytes(had_gradient), self._digest)

    def compare(self) -> None:
        """Begin to compare the backwards since the last time. A collective of 8 bytes."""
        from deepspeed import comm
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        # Every backend knows the maximum of floats. They hold 24 bits.
        digest, self._digest = self._digest & 0xFFFFFF, 0
        digests = torch.empty(2, dtype=torch.float32, device=accelerator.current_device_name())
        digests[0], digests[1] = digest, -digest  # without a copy, which would wait
        reduction = comm.all_reduce(digests, op=comm.ReduceOp.MAX, group=self._group, async_op=True)
        wait = reduction.wait if reduction else lambda: None  # oneCCL has waited already
        if not accelerator.is_synchronized_device():
            wait()  # the stream does, the host does not
            event = accelerator.Event()
            digests = digests.to("cpu", non_blocking=True)
            event.record(accelerator.current_stream())
            wait = event.synchronize
        self._results.append((digests, wait))

    def reached(self) -> bool:
        """Whether all that was compared since the last time was the same on all ranks; waits."""
        results, self._results = self._results, []
        for _, wait in results:
            wait()
        return all(largest == -smallest for largest, smallest in (d.tolist() for d, _ in results))
