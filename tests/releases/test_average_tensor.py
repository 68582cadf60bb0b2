"""ZeRO with gradients of several streams trains as on one stream, bit for bit."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from itertools import product

import pytest
from packaging.version import Version
from streams import Layout, Outcome, launch, random_layouts

# With offload, DeepSpeed orders the copies itself, with events right after them.
OWN_EVENTS = Version(version("deepspeed")) >= Version("0.19.8")

LAYOUTS = [
    Layout(stage, overlap, bucket, 3, offload=offload, reduce_scatter=reduce_scatter)
    for stage, overlap, bucket, offload, reduce_scatter in product(
        (1, 2), (True, False), (100, 300), (False, True), (True, False)
    )
]
OTHERS = [
    Layout(2, overlap, bucket, producers, **change)
    for overlap, (bucket, producers), change in product(
        (True, False),
        ((100, 2), (300, 1)),
        ({}, {"contiguous_gradients": False}, {"ga_steps": 2}, {"dtype": "bf16"}),
    )
]
if Version(version("deepspeed")) >= Version("0.16.6"):  # before, DeepSpeed itself ends in an error
    OTHERS += [
        Layout(1, True, bucket, producers, offload=True, dtype="bf16", accumulates=True)
        for bucket, producers in product((100, 300), (0, 2))
    ]
ZERO_3 = [
    Layout(3, overlap, bucket, producers, contiguous_gradients=contiguous)
    for overlap, bucket, producers, contiguous in product(
        (True, False), (100, 5000), (1, 3), (True, False)
    )
]
ONE_PRODUCER_AND_BUCKET = [
    Layout(stage, overlap, 5000, producers)
    for stage, overlap, producers in product((1, 2), (True, False), (0, 1))
]
# Gradients wait to be copied together. One rank cannot show a reduction that comes too early.
WAITING = [
    Layout(stage, overlap, bucket, 2, ga_steps=2, steps=2, waiting=10**6, **change)
    for (stage, bucket, change), overlap in product(
        (
            (1, 300, {}),
            (1, 5000, {"offload": True}),
            (2, 300, {"offload": True}),
            (2, 5000, {}),
            (2, 5000, {"watched": "parameter"}),
            (2, 5000, {"watched": "node"}),
        ),
        (True, False),
    )
]
WAITING_ALONE = [
    Layout(2, overlap, bucket, **{"waiting": 10**6} | change)
    for (bucket, change), overlap in product(
        (
            (5000, {"producers": 0}),
            (5000, {"producers": 3, "dtype": "bf16"}),
            (5000, {"waiting": 70, "reduce_scatter": False}),
            (300, {"waiting": 70}),
        ),
        (True, False),
    )
]


@cache
def outcomes(world_size: int, patched: bool) -> dict[Layout, Outcome]:
    layouts = ONE_PRODUCER_AND_BUCKET
    if patched:
        alone, together = [*LAYOUTS, *OTHERS, *ZERO_3, *WAITING_ALONE], [*LAYOUTS, *WAITING]
        layouts = [*alone, *layouts] if world_size == 1 else together
    return launch(layouts, world_size, patched=patched)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [(layout, 1) for layout in [*LAYOUTS, *OTHERS, *ZERO_3, *WAITING_ALONE]]
    + [(layout, 2) for layout in [*LAYOUTS, *WAITING]],
    ids=str,
)
def test_patched_training_is_exact_and_nothing_is_reported(layout: Layout, world_size: int) -> None:
    outcome = outcomes(world_size, True)[layout]
    assert outcome.races == []
    assert outcome.frees == []
    assert outcome.exact


@pytest.mark.parametrize("layout", ONE_PRODUCER_AND_BUCKET, ids=str)
def test_one_producer_and_one_bucket_wait_as_often_as_stock(layout: Layout) -> None:
    patched, stock = (outcomes(1, which)[layout].counts for which in (True, False))
    for kind in ("wait_stream", "wait_event"):
        assert patched.get(kind, 0) == stock.get(kind, 0), kind


def test_random_layouts_are_exact() -> None:
    for layout, outcome in launch(random_layouts(40, seed=1), 1, patched=True).items():
        assert outcome.right, (layout, outcome)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [(layout, 1) for layout in WAITING_ALONE] + [(layout, 2) for layout in WAITING],
    ids=str,
)
def test_gradients_wait_and_are_copied_together(layout: Layout, world_size: int) -> None:
    """Not those that a user's hook looks at, and not where DeepSpeed has events of its own."""
    counts = outcomes(world_size, True)[layout].counts
    copies, launches = counts.get("copies", 0), counts.get("launches", 0)
    if layout.watched == "parameter" or (layout.offload and OWN_EVENTS):
        assert copies == 0
    elif layout.bucket == 5000:
        assert copies > launches > 0
    assert counts.get("bytes", 0) < layout.waiting
