"""Lists of tensors to copy, of all layouts, and what must become of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (float("inf"), -float("inf"), float("nan"), -0.0, 6e-8, 3.4e38, 65520.0, 1e-41)
# Around a block of the kernel, a chunk of its table, and a vector.
SIZES = (0, 1, 2, 3, 7, 8, 31, 64, 1000, 2047, 2048, 2049, 4096, 4097, 9001)


@dataclass(frozen=True)
class Layout:
    """A source: its elements, its strides, and where it lies."""

    size: int
    kind: str
    offset: int
    """Elements of its storage before it."""
    gap: int
    """Elements of the bucket between its slice and the one before."""
    source: torch.dtype
    destination: torch.dtype


KINDS = ("flat", "matrix", "transposed", "strided", "expanded")


def layouts(dtypes: tuple[torch.dtype, ...] = FLOATS) -> st.SearchStrategy[list[Layout]]:
    layout = st.builds(
        Layout,
        size=st.sampled_from(SIZES),
        kind=st.sampled_from(KINDS),
        offset=st.integers(0, 9),
        gap=st.integers(0, 9),
        source=st.sampled_from(dtypes),
        destination=st.sampled_from(dtypes),
    )
    return st.lists(layout, max_size=8)


SCALES = st.sampled_from((None, None, 1.0, 0.125, 1 / 3, -1e3))


def source(
    layout: Layout, device: str, generator: torch.Generator, *, subnormals: bool = True
) -> Tensor:
    size, offset = layout.size, layout.offset
    room = torch.randn(offset + 2 * size + 1, generator=generator)
    places = torch.randint(len(room), (len(room) // 50,), generator=generator)
    special = SPECIAL if subnormals else SPECIAL[:-1]
    room[places] = torch.tensor(special)[places % len(special)]
    room = room.to(layout.source).to(device)[offset:]
    rows = next((n for n in (7, 3, 2) if size % n == 0), 1)
    if layout.kind == "matrix":
        return room[:size].view(rows, size // rows)
    if layout.kind == "transposed":
        return room[:size].view(rows, size // rows).t()
    if layout.kind == "strided":
        return room[: 2 * size : 2]
    if layout.kind == "expanded":
        return room[: size // rows].expand(rows, size // rows)
    return room[:size]


@dataclass
class Case:
    """Sources, and a bucket for each destination dtype with a slice for each source."""

    sources: list[Tensor]
    destinations: list[Tensor]
    buckets: dict[torch.dtype, Tensor]
    expected: dict[torch.dtype, Tensor]
    loose: dict[torch.dtype, Tensor]
    """Where a bucket's element was rounded."""


def case(
    drawn: list[Layout],
    scale: float | None,
    seed: int,
    device: str = "cpu",
    *,
    subnormals: bool = True,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    sources = [source(layout, device, generator, subnormals=subnormals) for layout in drawn]
    sizes = dict.fromkeys((layout.destination for layout in drawn), 9)
    slices = []
    for layout in drawn:
        start = sizes[layout.destination] + layout.gap
        sizes[layout.destination] = start + layout.size
        slices.append(slice(start, start + layout.size))
    # What lies between the slices must stay as it is.
    buckets = {d: torch.full((n + 9,), 7.5, dtype=d, device=device) for d, n in sizes.items()}
    expected = {d: bucket.clone() for d, bucket in buckets.items()}
    loose = {d: torch.zeros_like(bucket, dtype=torch.bool) for d, bucket in buckets.items()}
    for layout, tensor, part in zip(drawn, sources, slices, strict=True):
        target = layout.destination
        expected[target][part] = product(tensor, target, scale)
        wide = torch.float32 if scale is not None else layout.source
        loose[target][part] = torch.promote_types(wide, target) != target
    destinations = [
        buckets[layout.destination][part] for layout, part in zip(drawn, slices, strict=True)
    ]
    return Case(sources, destinations, buckets, expected, loose)


def product(tensor: Tensor, target: torch.dtype, scale: float | None) -> Tensor:
    flat = tensor.contiguous().flatten()
    if scale is None:
        return flat.to(target)
    exact = torch.float64 if torch.float64 in (flat.dtype, target) else torch.float32
    return (flat.to(exact) * scale).to(target)


BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def distance(got: Tensor, expected: Tensor) -> Tensor:
    """Units in the last place between elements; 0 between NaNs."""

    def ordered(tensor: Tensor) -> Tensor:
        bits = tensor.view(BITS[tensor.itemsize]).long()
        lowest = -(2 ** (8 * tensor.itemsize - 1))
        return torch.where(bits < 0, lowest - bits - 1, bits)  # -0.0 lies just below 0.0

    apart = (ordered(got) - ordered(expected)).abs()
    return apart.masked_fill(got.isnan() & expected.isnan(), 0)


def check(copied: Case, *, ulps: int = 0) -> None:
    """Every element, inside and outside the slices, is as expected: to the bit, or, where it was
    rounded, to that many units in the last place."""
    for dtype, bucket in copied.buckets.items():
        apart = distance(bucket, copied.expected[dtype])
        assert int(apart.max()) <= ulps
        assert not apart[~copied.loose[dtype]].any()
