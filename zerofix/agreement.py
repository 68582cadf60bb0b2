"""Notices that ranks had gradients of different parameters, without waiting for anybody."""

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
        self._result: tuple[Tensor, Callable[[], Any]] | None = None
        """The largest digest and minus the smallest, and what waits for their arrival."""

    def note(self, had_gradient: Sequence[bool]) -> None:
        """Take from a backward which parameters had a gradient, in one order on all ranks."""
        # ZeRO-1 reduces none before the last, and one rank may have more of those than another.
        if any(had_gradient):
            self._digest = zlib.crc32(bytes(had_gradient), self._digest)

    def compare(self) -> bool:
        """Begin to compare this step's backwards; whether those of the step before agreed.

        A collective of 8 bytes.
        """
        from deepspeed import comm
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        before = self._result
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
        self._result = digests, wait
        if before is None:
            return True
        digests, wait = before
        wait()
        largest, smallest = digests.tolist()
        return bool(largest == -smallest)
