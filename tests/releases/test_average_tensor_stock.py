"""Stock ZeRO-1/2 is wrong, in the real engine, where gradients come from several streams.

What is wrong where is said per release, so that a fix has this file as its list of work, and so
that virtual streams are seen to be silent wherever DeepSpeed is right.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import version
from itertools import product

import pytest
from packaging.version import Version
from streams import Layout, Outcome, launch, random_layouts

VERSION = Version(version("deepspeed"))
WAITS_FOR_PRODUCERS = Version("0.19.3") <= VERSION
"""With overlap_comm the reduction waits for every stream that wrote the bucket (#8080)."""
DOUBLE_BUFFER_CORRUPTS = Version("0.17.2") <= VERSION < Version("0.17.5")
"""A reduced bucket goes back to the first buffer, that may still be read (#7371)."""
WAITS_AT_EVERY_SWAP = Version("0.17.5") <= VERSION < Version("0.18.5")
"""The producer waits for the reduction after each bucket, and so they never overlap (#7805)."""
RECORDS_STREAMS = Version("0.19.0") <= VERSION
"""An oversized gradient that the reduction stream uses is not given back too early (#7965)."""

LAYOUTS = [
    Layout(stage=stage, overlap_comm=overlap, bucket=bucket, producers=producers)
    for stage, overlap, bucket, producers in product(
        (1, 2), (True, False), (100, 200, 300, 5000), (0, 1, 2)
    )
]
OTHERS = [
    replace(Layout(), overlap_comm=overlap, producers=producers, **change)
    for overlap, producers in product((True, False), (0, 2))
    for change in ({"reduce_scatter": False}, {"ga_steps": 2}, {"dtype": "bf16"})
]
TWO_RANKS = [layout for layout in LAYOUTS if layout.bucket == 300 and layout.producers in (0, 2)]


def single_stream(layout: Layout) -> bool:
    return layout.producers < 2


def wrong(layout: Layout) -> bool:
    """Whether the installed release's stock is wrong. It reduces after backward, which joins all
    streams, where a bucket holds everything and in ZeRO-1 without overlap_comm: there it is right.
    """
    if not layout.reduces_in_backward:
        return False
    if layout.overlap_comm and DOUBLE_BUFFER_CORRUPTS and layout.bucket == 300:
        return True
    if layout.overlap_comm and layout.oversized and layout.producers == 1:
        return not (WAITS_AT_EVERY_SWAP or RECORDS_STREAMS)
    return not single_stream(layout) and not (layout.overlap_comm and WAITS_FOR_PRODUCERS)


def unsettled(layout: Layout) -> bool:
    """Buffer reuse is open in 0.19.3 and later, and whether it shows depends on the layout."""
    return WAITS_FOR_PRODUCERS and layout.overlap_comm and not single_stream(layout)


@cache
def outcomes(world_size: int) -> dict[Layout, Outcome]:
    layouts = TWO_RANKS if world_size == 2 else [*LAYOUTS, *OTHERS]
    return launch(layouts, world_size, patched=False)


cases = [(layout, 1) for layout in [*LAYOUTS, *OTHERS]] + [(layout, 2) for layout in TWO_RANKS]


def for_each(selected: list[tuple[Layout, int]]) -> pytest.MarkDecorator:
    ids = [f"{layout} {world_size} ranks" for layout, world_size in selected]
    return pytest.mark.parametrize(("layout", "world_size"), selected, ids=ids)


@for_each([case for case in cases if wrong(case[0])])
def test_stock_is_wrong_and_the_checker_says_where(layout: Layout, world_size: int) -> None:
    outcome = outcomes(world_size)[layout]
    assert outcome.error > 1e-3
    assert any("stage_1_and_2.py" in report for report in outcome.races + outcome.frees)


@for_each([case for case in cases if not wrong(case[0]) and not unsettled(case[0])])
def test_stock_is_right_bit_for_bit_and_nothing_is_reported(
    layout: Layout, world_size: int
) -> None:
    outcome = outcomes(world_size)[layout]
    assert outcome.races == []
    assert outcome.frees == []
    assert outcome.exact


@pytest.mark.skipif(not WAITS_FOR_PRODUCERS, reason="0.19.3 closed it")
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_upstream_closed_is_silent(world_size: int) -> None:
    """Read after write, with overlap_comm and parameters that fit into a bucket."""
    for layout, outcome in outcomes(world_size).items():
        if layout.overlap_comm and not layout.oversized and not single_stream(layout):
            assert outcome.right, layout


@pytest.mark.skipif(not WAITS_FOR_PRODUCERS, reason="0.19.3 and later have it open alone")
def test_a_buffer_is_written_while_it_is_still_read_in_every_release() -> None:
    outcome = outcomes(1)[Layout(stage=2, overlap_comm=True, bucket=200, producers=2)]
    assert outcome.error > 1e-3
    assert outcome.races


def test_one_stream_and_one_bucket_order_streams_this_often() -> None:
    """A fix may not add to it: see ``Outcome.counts``."""
    one = outcomes(1)[Layout(stage=2, overlap_comm=True, bucket=5000, producers=1)]
    assert one.counts["wait_stream"] > 0
    assert "wait_event" not in one.counts or WAITS_FOR_PRODUCERS


def test_random_layouts_are_exact_or_reported() -> None:
    wrong = 0
    for layout, outcome in launch(random_layouts(40, seed=1), 1, patched=False).items():
        wrong += not outcome.exact
        if not outcome.exact:
            assert outcome.races or outcome.frees, layout
        if layout.schedule == "lazy" and outcome.races:
            assert not outcome.exact, (layout, outcome.races)
    assert wrong
