"""ZeRO-1/2 without offload sums the gradients of all micro-batches."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from itertools import product

import pytest
from conftest import Train
from packaging.version import Version
from training import Scenario

HAS_THE_DEFECT = Version("0.17.6") <= Version(version("deepspeed")) < Version("0.18.3")
TOLERANCE = 2e-6
"""In fp32. Half precision has no larger one: the reference rounds where DeepSpeed does."""

# Steps of different length one after the other: a sum that stays behind shows in the next.
BY_HAND = Scenario(stage=2, offload=False, backwards=(3, 1, 2, 3))
ACCUMULATED = Scenario(stage=2, offload=False, backwards=(3, 3, 3), ga_steps=3)
SINGLE = Scenario(stage=2, offload=False, backwards=(1, 1, 1))

MATRIX = [
    replace(base, stage=stage, optimizer=optimizer, dtype=dtype)
    for base, stage, optimizer, dtype in product(
        (SINGLE, BY_HAND, ACCUMULATED), (1, 2), ("sgd", "adam"), ("fp32", "bf16")
    )
]
OTHER_ROADS = [
    replace(BY_HAND, overlap_comm=True),
    replace(ACCUMULATED, overlap_comm=True),
    replace(ACCUMULATED, ga_steps=2, backwards=(2, 3, 1, 2)),
    # The step that overflows is skipped, and nothing of it may stay.
    replace(BY_HAND, backwards=(3, 2, 3), dtype="fp16", overflow=1),
    replace(ACCUMULATED, dtype="fp16", overflow=1),
    # Some parameters have no gradient in some micro-batches.
    *(
        replace(base, backwards=(3, 3, 3), branch=branch)
        for base, branch in product((BY_HAND, ACCUMULATED), ((0,), (0, 2), (1, 2)))
    ),
]
SCENARIOS = MATRIX + OTHER_ROADS

world_sizes = pytest.mark.parametrize("world_size", [1, 2])


def for_each(scenarios: list[Scenario]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", scenarios, ids=str)


def stock_is_wrong(scenario: Scenario) -> bool:
    """Whether the installed release, unpatched, loses gradients in this scenario."""
    return HAS_THE_DEFECT and scenario.stage == 2 and any(n > 1 for n in scenario.backwards)


@world_sizes
@for_each(SCENARIOS)
def test_patched_training_is_that_of_plain_torch(
    scenario: Scenario, world_size: int, train: Train
) -> None:
    assert train(scenario, world_size, patched=True).error <= TOLERANCE


@world_sizes
@for_each(SCENARIOS)
def test_stock_training_is_wrong_exactly_where_the_release_has_the_defect(
    scenario: Scenario, world_size: int, train: Train
) -> None:
    error = train(scenario, world_size, patched=False).error
    if stock_is_wrong(scenario):
        assert error > 1e-4
    else:
        assert error <= TOLERANCE


@world_sizes
@for_each([scenario for scenario in SCENARIOS if not stock_is_wrong(scenario)])
def test_training_that_was_right_stays_the_same_bit_for_bit(
    scenario: Scenario, world_size: int, train: Train
) -> None:
    stock, patched = (train(scenario, world_size, patched=patched) for patched in (False, True))
    assert patched.digest == stock.digest
    # On several ranks, gradients that are missing are reduced as zeros.
    if world_size == 1 or not scenario.branch:
        assert patched.copied_elements == stock.copied_elements


@world_sizes
@for_each(MATRIX)
def test_without_offload_there_is_no_buffer_in_cpu_memory(
    scenario: Scenario, world_size: int, train: Train
) -> None:
    assert train(scenario, world_size, patched=True).buffers == 0
