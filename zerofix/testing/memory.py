"""A caching allocator: freed memory goes at once to the next allocation of the same stream."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zerofix.testing.checker import Access, Allocation, Checker, Clock, Span, UnsafeFree, join
from zerofix.testing.lines import Line, caller
from zerofix.testing.scheduler import Operation, Queue

array = Tensor.numpy
"""The method itself: in the context a call through the class waits for the current stream."""

ROUND = 512
"""Bytes. CUDA's allocator rounds to the same, and so tensors of different size share memory."""


@dataclass(eq=False)
class Block:
    """Memory of one stream, used by one allocation after the other."""

    root: Tensor
    """uint8, one dimension."""
    stream: int
    last: Allocation | None = None
    """The allocation that has it, or had it last."""
    freed: Line | None = None
    pending: Sequence[Operation] = ()
    """What ``record_stream`` makes the next allocation wait for."""
    settled: Clock = field(default_factory=dict)
    """What is certain to have run when that has."""


@dataclass(frozen=True)
class Place:
    """Where a tensor's elements are, without keeping the tensor's memory from being freed."""

    root: Tensor
    """The block's memory, or for memory that is not of the allocator an alias that keeps it."""
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Call with dispatch to modes turned off."""
        root = self.root
        at = (root.dtype, root.storage_offset(), root.size(), root.stride())
        if at == (self.dtype, self.offset, self.size, self.stride):
            return root
        storage = root.untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


def contiguous_size(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a strided tensor."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


class Memory:
    """The virtual device's memory: allocations by address, and free blocks by stream.

    Memory that was there before is used but never freed here. The methods want dispatch to modes
    turned off.
    """

    def __init__(self, checker: Checker, queue: Queue) -> None:
        self.checker = checker
        self.queue = queue
        self.open = True
        self.live: dict[int, Block] = {}
        self.foreign: dict[int, tuple[Allocation, StorageWeakRef]] = {}
        self.free: list[Block] = []
        # Filled by finalizers, that may run in the middle of anything.
        self.freed: deque[Block] = deque()

    def allocate(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, stream: int
    ) -> Tensor:
        """An uninitialised tensor: the old contents of its memory, or NaN where it is new."""
        nbytes = contiguous_size(size, stride) * dtype.itemsize
        if nbytes == 0:
            return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype)
        line = caller()
        block, remains = self.take(-(-nbytes // ROUND) * ROUND, stream, line)
        block.last = Allocation(stream, line, remains=remains)
        handle = array(block.root)[:nbytes]
        self.live[block.root.data_ptr()] = block
        # The storage made from this array owns it: the array dies when the last tensor does.
        weakref.finalize(handle, self.release, block).atexit = False
        storage = torch.from_numpy(handle).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))

    def take(self, nbytes: int, stream: int, line: Line) -> tuple[Block, list[Access]]:
        """A block that is large enough, and those of its accesses that may still be to come.

        Any free block of the stream may be chosen: by preference one that is not safe, then the
        smallest, then the one freed last.
        """
        while self.freed:
            self.free.append(self.freed.popleft())
        best: Block | None = None
        best_remains: list[Access] = []
        for block in reversed(self.free):
            if block.stream != stream or block.last is None or block.freed is None:
                continue
            if not all(operation.done for operation in block.pending):
                continue
            remains = [
                access
                for access in self.checker.unordered(stream, block.last.accesses)
                if access.number > block.settled.get(access.stream, -1)
            ]
            for access in remains:
                self.checker.report(UnsafeFree(access, stream, block.last.line, block.freed, line))
            if block.root.numel() < nbytes:
                continue
            rank = (not remains, block.root.numel())
            if best is None or rank < (not best_remains, best.root.numel()):
                best, best_remains = block, remains
        if best is None:
            # All bits set is NaN in every floating-point type.
            return Block(torch.full((nbytes,), 255, dtype=torch.uint8), stream), []
        self.free.remove(best)
        return best, best_remains

    def release(self, block: Block) -> None:
        if self.open and block.last is not None:
            del self.live[block.root.data_ptr()]
            block.freed = caller()
            last = self.queue.last
            block.pending = [last[stream] for stream in block.last.recorded if stream in last]
            block.settled = {}
            for stream in block.last.recorded:
                join(block.settled, self.checker.clocks.get(stream, {}))
            self.freed.append(block)

    def close(self) -> None:
        self.open = False
        self.live.clear()
        self.foreign.clear()
        self.free.clear()
        self.freed.clear()

    def find(self, tensor: Tensor) -> tuple[Allocation | None, Place, Span]:
        """Who owns a tensor's memory, and where in it the tensor is.

        The owner is None for a tensor without elements.
        """
        size, stride, offset = tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        span = Span(offset * tensor.itemsize, size, stride, tensor.itemsize)
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self.live:
            block = self.live[address]
            return block.last, Place(block.root, tensor.dtype, offset, size, stride), span
        place = Place(tensor.detach(), tensor.dtype, offset, size, stride)
        if tensor.numel() == 0:
            return None, place, span
        if address in self.foreign and not self.foreign[address][1].expired():  # type: ignore[no-untyped-call]
            return self.foreign[address][0], place, span
        allocation = Allocation(-1, caller())
        self.foreign[address] = (allocation, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return allocation, place, span
