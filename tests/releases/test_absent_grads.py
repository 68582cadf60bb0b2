"""A parameter without gradient has one of zero: absent_grads, its twin, reduction_order."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from itertools import product
from subprocess import TimeoutExpired

import pytest
from absent import BRANCHES, Case, launch

TOLERANCE = {"bf16-fp32": 5e-3}
"""Elsewhere 2e-6. With bf16 and sums in fp32, each release rounds in places of its own."""

ALL = 2**BRANCHES - 1
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


def chosen(seed: int, world_size: int) -> Case:
    """A case drawn by chance, in which each rank has a pattern of its own."""
    draw = random.Random(seed)
    stage, offload = draw.choice(ROADS)
    dtype = draw.choice(["fp32", "fp32", "fp16", "bf16", "bf16-fp32"])
    # ZeRO-1 has it wrong on several ranks up to 0.18, and without offload not in this optimizer.
    dtype = "bf16" if (stage, dtype) == (1, "bf16-fp32") else dtype
    accumulated = draw.randint(1, 4)
    # By hand, gradients are summed and not averaged: training that amplifies what is rounded.
    by_hand = draw.random() < 0.3 and dtype != "bf16-fp32"
    patterns = draw.choice([1, world_size])
    used = tuple(
        tuple(
            tuple(draw.randrange(2**BRANCHES) for _ in range(patterns))
            for _ in range(draw.randint(1, 4) if by_hand else accumulated)
        )
        for _ in range(4)
    )
    overflow = (-1, -1)
    if dtype == "fp16" and draw.random() < 0.7:
        step = draw.randrange(3)
        overflow = (step, draw.randrange(len(used[step])))
    return Case(
        stage,
        offload,
        used,
        optimizer="sgd" if dtype == "bf16-fp32" else draw.choice(["sgd", "adam"]),
        dtype=dtype,
        overlap_comm=draw.random() < 0.5,
        by_hand=by_hand,
        clipping=draw.choice([0.0, 0.0, 0.5]),
        groups=draw.choice([1, 2]),
        overflow=overflow,
    )


CHOSEN = [(chosen(seed, world_size), world_size) for world_size, seed in product((1, 2), range(60))]


# What is thrown away with zero_grad does not come back, and no_sync goes with overlap_comm.
SOME = alike((ALL, 1), (3, 6), (0, ALL))
ABANDONED = [
    (Case(stage, offload, SOME, by_hand=True, abandon=True), 1) for stage, offload in ROADS
]
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
BESIDE = ABANDONED + NO_SYNC + FROZEN + EMPTIED + HEADS + LEAVES + CHECKPOINTED


@cache
def errors(world_size: int, patched: bool, ordered: bool) -> Mapping[Case, float | str]:
    every = WRONG + CHOSEN + BESIDE if patched else WRONG
    cases = [case for case, size in every if size == world_size]
    if ordered:  # reduction_order has to be asked for: the others must do without
        cases = [case for case in cases if not case.agreed or case.checkpointed]
    elif patched:
        cases = [case for case in cases if case.agreed or case.stage == 3 or world_size == 1]
    cases = list(dict.fromkeys(cases))
    try:
        return launch(cases, world_size, patched=patched, ordered=ordered)
    except (RuntimeError, TimeoutExpired) as error:
        # Once is enough: every test of the group would wait for the same end.
        return dict.fromkeys(cases, str(error))


def error(told: float | str) -> float:
    if isinstance(told, str):
        pytest.fail(told)
    return told


@pytest.mark.parametrize(("case", "world_size"), WRONG, ids=str)
def test_stock_is_wrong(case: Case, world_size: int) -> None:
    assert error(errors(world_size, False, False)[case]) > 1e-4


@pytest.mark.parametrize(("case", "world_size"), WRONG + CHOSEN + BESIDE, ids=str)
def test_a_missing_gradient_is_zero(case: Case, world_size: int) -> None:
    found = [errors(world_size, True, ordered).get(case) for ordered in (False, True)]
    found = [told for told in found if told is not None]
    assert found
    for told in found:
        assert error(told) <= TOLERANCE.get(case.dtype, 2e-6)


def test_zero_grad_leaves_optimizers_alone_that_are_not_zeros() -> None:
    case = Case(1, False, SOME, dtype="bf16-fp32", by_hand=True, abandon=True)
    told = launch([case], 1, patched=True)[case]
    # Some releases take an optimizer whose weights nobody can ask for.
    assert isinstance(told, float) or "'NoneType' object has no attribute 'cpu'" in told
