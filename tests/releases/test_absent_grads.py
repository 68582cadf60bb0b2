"""A parameter without gradient has one of zero: absent_grads, its twin, reduction_order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from itertools import product
from subprocess import TimeoutExpired

import pytest
from absent import BF16_OPTIMIZER, BRANCHES, Case, launch, train_in, worker
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from processes import World

TOLERANCE = {"bf16-fp32": 5e-3, "fp16-fp32": 5e-4}
"""Elsewhere 2e-6. With sums in fp32, each release rounds in places of its own."""

ALL = 2**BRANCHES - 1
DISAGREE = "ranks had gradients of different parameters"
Steps = tuple[tuple[tuple[int, ...], ...], ...]


def alike(*steps: tuple[int, ...]) -> Steps:
    """The branches that all ranks use, for each step and micro-batch."""
    return tuple(tuple((used,) for used in step) for step in steps)


STALE = alike((ALL,), (1,), (1,))
LATE = alike((ALL, ALL), (0, ALL), (1, ALL))
EARLY = alike((ALL, 1), (ALL, 0), (3, 6))
OVERFLOW = alike((ALL, ALL), (ALL, 1), (1, 1))
# The two have the same shapes: nothing but the numbers tells that they are not the same.
EACH_ITS_OWN: Steps = (((1, 2),), ((4, 1),), ((2, 4),))

# What stock does to them, in every release: wrong, with these numbers of ranks.
ROADS = list(product((1, 2, 3), (False, True)))
ZERO2_OFFLOAD_AND_3 = [(2, True), (3, False), (3, True)]
WRONG = [
    *((Case(stage, offload, STALE), 1) for stage, offload in [(1, True), *ZERO2_OFFLOAD_AND_3]),
    *((Case(stage, offload, LATE), 1) for stage, offload in ZERO2_OFFLOAD_AND_3),
    *((Case(stage, True, EARLY), 1) for stage in (2, 3)),
    *(
        (Case(stage, offload, OVERFLOW, dtype="fp16", overflow=(0, 1)), 1)
        for stage, offload in [(1, True), *ZERO2_OFFLOAD_AND_3]
    ),
    (Case(1, False, EARLY, overlap_comm=True), 2),
    (Case(1, False, EACH_ITS_OWN), 2),
    *((Case(2, offload, EACH_ITS_OWN), 2) for offload in (False, True)),
]
if BF16_OPTIMIZER:
    WRONG.append((Case(1, False, EACH_ITS_OWN, dtype="bf16-fp32", clipping=5.0), 2))


# Not left to hypothesis, whose first examples resemble each other.
FIXED = [
    (*road, dtype, world_size)
    for road, dtype, world_size in product(ROADS, ("fp32", "fp16", "bf16", "bf16-fp32"), (1, 2))
    if BF16_OPTIMIZER or (*road, dtype) != (1, False, "bf16-fp32")
] + [(1, *rest) for rest in product((False, True), ["fp16-fp32"], (1, 2))]


@st.composite
def cases(draw: st.DrawFn, stage: int, offload: bool, dtype: str, world_size: int) -> Case:
    """A case in which each rank may have a pattern of its own."""
    # By hand, gradients are summed and not averaged: training that amplifies what is rounded.
    by_hand = dtype != "bf16-fp32" and draw(st.booleans())
    ranks = st.tuples(*[st.integers(0, ALL)] * draw(st.sampled_from([1, world_size])))
    micro_batches = draw(st.integers(1, 4))
    steps = st.lists(ranks, min_size=1 if by_hand else micro_batches, max_size=micro_batches)
    used = tuple(map(tuple, draw(st.lists(steps, min_size=4, max_size=4))))
    overflow = (-1, -1)
    if dtype == "fp16" and draw(st.booleans()):
        step = draw(st.integers(0, 2))
        overflow = (step, draw(st.integers(0, len(used[step]) - 1)))
    return Case(
        stage,
        offload,
        used,
        optimizer="sgd" if dtype == "bf16-fp32" else draw(st.sampled_from(["sgd", "adam"])),
        dtype=dtype,
        overlap_comm=draw(st.booleans()),
        by_hand=by_hand,
        clipping=draw(st.sampled_from([0.0, 0.5])),
        groups=draw(st.integers(1, 2)),
        overflow=overflow,
    )


# What is thrown away with zero_grad does not come back, and no_sync goes with overlap_comm.
SOME = alike((ALL, 1), (3, 6), (0, ALL))
ABANDONED = [
    (Case(stage, offload, SOME, by_hand=True, abandon=True), world_size)
    for (stage, offload), world_size in product([(0, False), *ROADS], (1, 2))
]
if BF16_OPTIMIZER:
    thrown_away = Case(1, False, SOME, dtype="bf16-fp32", by_hand=True, abandon=True)
    ABANDONED += [(thrown_away, 1), (thrown_away, 2)]
NO_SYNC = [
    (Case(1, offload, SOME, overlap_comm=overlap, no_sync=True), world_size)
    for offload, overlap, world_size in product((False, True), (False, True), (1, 2))
]
# What programs do beside: freeze layers for a while, take a step without gradients, or one after
# two backwards each of which says that it is the last.
FROZEN = [
    (Case(stage, offload, SOME, overlap_comm=overlap, frozen=frozen), world_size)
    for (stage, offload), overlap, frozen, world_size in product(
        ROADS, (False, True), ((1,), (0,)), (1, 2)
    )
    if world_size == 1 or stage < 3
]
EMPTIED = [
    (Case(stage, offload, SOME, emptied=(1,), optimizer=optimizer), 1)
    for (stage, offload), optimizer in product(ROADS, ("sgd", "adam"))
]
HEADS = [
    (Case(stage, offload, alike((ALL,), (1,), (6,)), heads=True), 1)
    for stage, offload in ZERO2_OFFLOAD_AND_3
]
# Leaf modules are DeepSpeed's own way.
LEAVES = [(Case(3, offload, EACH_ITS_OWN), 2) for offload in (False, True)]
CHECKPOINTED = [
    (Case(stage, offload, used, overlap_comm=stage == 1, checkpointed=True), 2)
    for stage, offload, used in product((1, 2), (False, True), (STALE, SOME, EACH_ITS_OWN))
]
# A bucket more on one rank, which the other adds at the end.
ALONE: Steps = (((1,), (1,)), ((1,), (1, 0)))
LONE = [
    (Case(1, offload, ALONE, overlap_comm=True, lone=True, skipped=skipped), 2)
    for offload, skipped in product((False, True), ((), (1,)))
]
ADAPTERS = [
    (Case(stage, offload, EACH_ITS_OWN, overlap_comm=overlap, adapters=True), 2)
    for stage, offload, overlap in product((1, 2), (False, True), (False, True))
]
UNMANAGED = [
    *((Case(stage, offload, LATE, unmanaged=True, abandon=True), 1) for stage, offload in ROADS),
    *((Case(stage, offload, EACH_ITS_OWN, unmanaged=True), 2) for stage, offload in ROADS),
    *(
        (Case(stage, offload, EACH_ITS_OWN, unmanaged=True, skipped=(0,)), 2)
        for stage, offload in product((1, 2), (False, True))
    ),
]
BESIDE = ABANDONED + NO_SYNC + FROZEN + EMPTIED + HEADS + LEAVES + CHECKPOINTED + LONE + ADAPTERS
if Version(version("deepspeed")) >= Version("0.19.4"):
    BESIDE += UNMANAGED


@cache
def errors(world_size: int, patched: bool, ordered: bool) -> Mapping[Case, float | str]:
    every = WRONG + BESIDE if patched else WRONG
    cases = [case for case, size in every if size == world_size]
    if ordered:  # from the first backward on: the others must do without
        cases = [case for case in cases if case.needs_order or case.checkpointed]
    elif patched:
        cases = [case for case in cases if not case.needs_order or world_size == 1]
    cases = list(dict.fromkeys(cases))
    try:
        return launch(cases, world_size, patched=patched, ordered=ordered)
    except (RuntimeError, TimeoutExpired) as error:
        # Once is enough: every test of the group would wait for the same end.
        return dict.fromkeys(cases, str(error))


def tolerance(case: Case) -> float:
    return TOLERANCE.get(case.dtype, 2e-6)


def error(told: float | str) -> float:
    if isinstance(told, str):
        pytest.fail(told)
    return told


@pytest.mark.parametrize(("case", "world_size"), WRONG, ids=str)
def test_stock_is_wrong(case: Case, world_size: int) -> None:
    assert error(errors(world_size, False, False)[case]) > max(1e-4, tolerance(case))


@pytest.mark.parametrize(("case", "world_size"), WRONG + BESIDE, ids=str)
def test_a_missing_gradient_is_zero(case: Case, world_size: int) -> None:
    found = [errors(world_size, True, ordered).get(case) for ordered in (False, True)]
    found = [told for told in found if told is not None]
    assert found
    for told in found:
        assert error(told) <= tolerance(case)


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[tuple[int, bool], World]]:
    """Number of ranks, and whether they are ordered, to a world that stays."""
    started: dict[tuple[int, bool], World] = {}
    yield started
    said = "".join(log for world in started.values() for log in world.logs())
    for world in started.values():
        world.__exit__()
    assert DISAGREE not in said  # all ranks agreed, or were ordered


@pytest.mark.parametrize(("stage", "offload", "dtype", "world_size"), FIXED)
@settings(max_examples=4, derandomize=True, deadline=None)
@given(data=st.data())
def test_random_patterns(
    data: st.DataObject,
    worlds: dict[tuple[int, bool], World],
    stage: int,
    offload: bool,
    dtype: str,
    world_size: int,
) -> None:
    case = data.draw(cases(stage, offload, dtype, world_size))
    ordered = case.needs_order
    key = world_size, ordered
    if key not in worlds:
        worlds[key] = World(worker, world_size, patched=True)
    try:
        told = train_in(worlds[key], [case], ordered=ordered)[case]
    except (RuntimeError, TimeoutExpired):
        worlds.pop(key).__exit__()  # the next example has a new one
        raise
    assert error(told) <= tolerance(case)


# The first step in which ranks differ is given up, and no other.
BEGINNING = [
    Case(
        stage,
        offload,
        (((ALL,),), *EACH_ITS_OWN, ((ALL,),)),
        optimizer="adam",
        dtype=dtype,
        overlap_comm=overlap,
        skipped=(1,),
    )
    for stage, offload, (dtype, overlap) in product(
        (1, 2), (False, True), [("fp32", False), ("fp32", True), ("fp16", False), ("bf16", True)]
    )
] + [
    Case(stage, offload, EACH_ITS_OWN, overlap_comm=overlap, skipped=(0,), adapters=True)
    for stage, offload, overlap in product((1, 2), (False, True), (False, True))
]


def test_the_step_in_which_ranks_first_differ_is_skipped_and_the_others_are_right() -> None:
    with World(worker, 2, patched=True) as world:
        for k, case in enumerate(BEGINNING):
            agreed = replace(case, used=LATE, skipped=(), adapters=False)
            assert error(train_in(world, [agreed], ordered=False)[agreed]) <= 2e-6
            assert [log.count(DISAGREE) for log in world.logs()] == [k, 0]
            assert error(train_in(world, [case], ordered=False)[case]) <= 2e-6, case
            assert [log.count(DISAGREE) for log in world.logs()] == [k + 1, 0]


def test_ranks_that_differ_under_zero3_are_warned_once() -> None:
    with World(worker, 2, patched=True) as world:
        for k, offload in enumerate((False, True)):
            wrong = Case(3, offload, EACH_ITS_OWN, leaves=False)
            for case in (replace(wrong, used=LATE), replace(wrong, leaves=True)):
                assert error(train_in(world, [case], ordered=False)[case]) <= 2e-6
            assert [log.count(DISAGREE) for log in world.logs()] == [k, 0]
            assert error(train_in(world, [wrong], ordered=False)[wrong]) > 1e-4
            assert [log.count(DISAGREE) for log in world.logs()] == [k + 1, 0]
