"""One Triton launch that copies many tensors, found through a table of pointers.

Importing this module imports Triton.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_SMALLEST_CHUNK = 4096
"""Elements of a chunk, at least: one program copies a chunk, and this is two of its blocks."""
_MOST_CHUNKS = 16384
"""About so many programs share a large list: several turns for each place on a large GPU, and a
table of half a megabyte."""
_BLOCK = 2048
_VECTOR = 16
"""Bytes of the widest load and store."""

_FLOATS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_BITS = {2: tl.int16, 4: tl.int32}
"""Element size to type, where bits are copied as they are."""


@triton.jit  # type: ignore[untyped-decorator]
def kernel(  # type: ignore[no-untyped-def]
    table,
    scale,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + tl.program_id(0).to(tl.int64) * 4
    source = tl.load(row).to(tl.pointer_type(SOURCE))
    destination = tl.load(row + 1).to(tl.pointer_type(DESTINATION))
    count = tl.load(row + 2).to(tl.int32)
    in_vectors = tl.load(row + 3).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    # Not range(): in the interpreter, NumPy 2.4 takes no tensor for a bound.
    start = 0
    while start < in_vectors:
        at = start + lane
        value = tl.load(tl.multiple_of(source, 16) + at)
        if SCALED:
            value = value.to(tl.float32) * scale
        tl.store(tl.multiple_of(destination, 16) + at, value.to(DESTINATION))
        start += BLOCK
    while start < count:
        at = start + lane
        value = tl.load(source + at, mask=at < count)
        if SCALED:
            value = value.to(tl.float32) * scale
        tl.store(destination + at, value.to(DESTINATION), mask=at < count)
        start += BLOCK


def constants(source: torch.dtype, destination: torch.dtype, scaled: bool) -> dict[str, object]:
    """The kernel's compile-time arguments."""
    # Bits that are only moved stay what they are, also those of a NaN.
    moved = _BITS[source.itemsize] if source == destination and not scaled else None
    return {
        "SOURCE": moved or _FLOATS[source],
        "DESTINATION": moved or _FLOATS[destination],
        "SCALED": scaled,
        "BLOCK": _BLOCK,
    }


def table(sources: list[Tensor], destinations: list[Tensor]) -> Tensor:
    """The chunks of these copies, one a row: int64, on the CPU, of shape (chunks, 4).

    A row has the addresses of a chunk's source and destination, its elements, and how many of
    them, in whole blocks, may be copied in vectors. Addresses are whole, so nothing in the kernel
    grows with the size of a tensor or its offset in a storage.
    """
    # Python is what a long list costs: no bytecode for each tensor.
    source = np.fromiter(map(Tensor.data_ptr, sources), np.int64, len(sources))
    destination = np.fromiter(map(Tensor.data_ptr, destinations), np.int64, len(sources))
    count = np.fromiter(map(Tensor.numel, sources), np.int64, len(sources))
    share = max(_SMALLEST_CHUNK, int(count.sum()) // _MOST_CHUNKS)
    chunk = 1 << (share - 1).bit_length()  # a power of two keeps the chunks aligned as the first
    chunks = -(-count // chunk)
    owner = np.repeat(np.arange(len(count)), chunks)
    start = (np.arange(len(owner)) - (np.cumsum(chunks) - chunks)[owner]) * chunk
    rows = np.empty((len(owner), 4), np.int64)
    rows[:, 0] = source[owner] + start * sources[0].itemsize
    rows[:, 1] = destination[owner] + start * destinations[0].itemsize
    rows[:, 2] = np.minimum(chunk, count[owner] - start)
    aligned = (source | destination) % _VECTOR == 0
    rows[:, 3] = np.where(aligned[owner], rows[:, 2] // _BLOCK * _BLOCK, 0)
    return torch.from_numpy(rows)


def launch(sources: list[Tensor], destinations: list[Tensor], scale: float | None) -> None:
    """Copy ``sources[i]`` into ``destinations[i]``, on the current stream.

    All sources are of one dtype and all destinations of one, each fp32, bf16 or fp16. All
    are contiguous and on one device, which is the current one.
    """
    rows = table(sources, destinations)
    if not len(rows):
        return
    if destinations[0].is_cuda:
        # Both allocators watch over the table. That of pinned memory gives a block to nobody else
        # before the transfer is done, that of device memory only to later work of this stream.
        rows = rows.pin_memory().to(destinations[0].device, non_blocking=True)
    types = constants(sources[0].dtype, destinations[0].dtype, scale is not None)
    kernel[(len(rows),)](rows, 1.0 if scale is None else float(scale), **types)
