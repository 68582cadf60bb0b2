"""ZeRO with gradients of several streams trains as on one stream, bit for bit."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from streams import Layout, Outcome, launch

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


@cache
def outcomes(world_size: int, patched: bool) -> dict[Layout, Outcome]:
    layouts = ONE_PRODUCER_AND_BUCKET
    if patched:
        layouts = [*LAYOUTS, *OTHERS, *ZERO_3, *layouts] if world_size == 1 else LAYOUTS
    return launch(layouts, world_size, patched=patched)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [(layout, 1) for layout in [*LAYOUTS, *OTHERS, *ZERO_3]] + [(layout, 2) for layout in LAYOUTS],
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
