"""ZeRO-1/2 with optimizer offload keeps the gradient of every backward."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from itertools import product

import pytest
from conftest import Train
from packaging.version import Version
from training import Scenario

FIXED_UPSTREAM = Version(version("deepspeed")) >= Version("0.19.0")
TOLERANCE = 2e-6
"""In fp32. Half precision has no larger one: the reference rounds where DeepSpeed does."""

# Steps of different length one after the other: a sum that stays behind shows in the next.
BY_HAND = Scenario(stage=2, offload=True, backwards=(3, 1, 2, 3))
ACCUMULATED = Scenario(stage=2, offload=True, backwards=(3, 3, 3), ga_steps=3)
SINGLE = Scenario(stage=2, offload=True, backwards=(1, 1, 1))

SINGLES = [
    replace(SINGLE, stage=stage, optimizer=optimizer, dtype=dtype)
    for stage, optimizer, dtype in product((1, 2), ("sgd", "adam"), ("fp32", "bf16"))
]
SEVERAL = [
    replace(base, stage=stage, optimizer=optimizer, dtype=dtype)
    for base, stage, optimizer, dtype in product(
        (BY_HAND, ACCUMULATED), (1, 2), ("sgd", "adam"), ("fp32", "bf16")
    )
]
PINNED = [
    replace(base, dtype=dtype, pin_memory=True)
    for base, dtype in product((BY_HAND, ACCUMULATED), ("fp32", "bf16"))
]
OTHER_ROADS = [
    replace(BY_HAND, overlap_comm=True),
    replace(ACCUMULATED, overlap_comm=True),
    replace(ACCUMULATED, ga_steps=2, backwards=(2, 2, 2)),
    replace(ACCUMULATED, ga_steps=2, backwards=(2, 3, 1, 2)),
    replace(ACCUMULATED, no_reset=True),
]
# The gradients of a backward that the user throws away must not come back.
DISCARDING = [replace(BY_HAND, discard=how) for how in ("zero_grad", "load")]
# A parameter without gradient at the boundary: its sum is not used, in no release.
UNUSED = replace(BY_HAND, branch=(0,))
OVERFLOWING = [
    replace(BY_HAND, backwards=(3, 2, 3), dtype="fp16", overflow=1),
    replace(ACCUMULATED, dtype="fp16", overflow=1),
]
# Some parameters have no gradient in some micro-batches, though always in the last.
BRANCHED = [
    replace(base, backwards=(3, 3, 3), branch=branch)
    for base, branch in product((BY_HAND, ACCUMULATED), ((0, 2), (1, 2)))
]
SCENARIOS = SINGLES + SEVERAL + PINNED + OTHER_ROADS + OVERFLOWING + BRANCHED

world_sizes = pytest.mark.parametrize("world_size", [1, 2])


def for_each(scenarios: list[Scenario]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", scenarios, ids=str)


def stock_is_wrong(scenario: Scenario) -> bool:
    """Whether the installed release, unpatched, loses or adds gradients in this scenario."""
    if scenario.stage != 2:
        return False
    if FIXED_UPSTREAM:
        return adds_an_old_sum(scenario)
    # Without accumulation in its configuration it keeps the last backward only, and else the
    # first and the last.
    kept = 1 if scenario.ga_steps == 1 else 2
    return any(backwards > kept for backwards in scenario.backwards)


def adds_an_old_sum(scenario: Scenario) -> bool:
    """Whether 0.19 adds the last step's sum: it does for gradients that come late in a step.

    There copy_grads has nothing to repair, and absent_grads has.
    """
    return bool(scenario.branch) and 0 not in scenario.branch


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
    assert patched.copied_elements <= stock.copied_elements


@world_sizes
@for_each(SINGLES)
def test_one_backward_a_step_takes_no_buffer_and_no_copy_more_than_stock(
    scenario: Scenario, world_size: int, train: Train
) -> None:
    stock, patched = (train(scenario, world_size, patched=patched) for patched in (False, True))
    assert patched.buffers == 0
    assert patched.buffer_elements == 0
    assert patched.copied_elements == stock.copied_elements


@world_sizes
@for_each([scenario for scenario in SEVERAL if scenario.stage == 1])
def test_zero_1_sums_in_the_gradient_and_takes_no_buffer(
    scenario: Scenario, world_size: int, train: Train
) -> None:
    assert train(scenario, world_size, patched=True).buffers == 0


@pytest.mark.skipif(FIXED_UPSTREAM, reason="copy_grads is not applied")
@world_sizes
@for_each(DISCARDING)
def test_gradients_that_are_thrown_away_do_not_come_back(
    scenario: Scenario, world_size: int, train: Train
) -> None:
    assert train(scenario, world_size, patched=True).error <= TOLERANCE


@pytest.mark.skipif(FIXED_UPSTREAM, reason="copy_grads is not applied")
@pytest.mark.parametrize("world_size", [1])  # with two, the other rank has that parameter
@for_each([UNUSED])
def test_a_sum_that_a_step_does_not_use_is_forgotten(
    scenario: Scenario, world_size: int, train: Train
) -> None:
    assert train(scenario, world_size, patched=True).left_over == 0


@pytest.mark.skipif(FIXED_UPSTREAM, reason="copy_grads is not applied")
@pytest.mark.parametrize("world_size", [1])
@for_each([BY_HAND, ACCUMULATED])
def test_a_partial_sum_is_read_and_written_once_between_two_backwards(
    scenario: Scenario, world_size: int, train: Train
) -> None:
    elements = 8 * 16 + 16 + 2 * (16 * 16 + 16) + 16 * 4 + 4
    between = sum(backwards - 1 for backwards in scenario.backwards)
    patched = train(scenario, world_size, patched=True)
    assert patched.buffer_elements == 2 * between * elements


@world_sizes
@for_each([*PINNED, BY_HAND, ACCUMULATED])
def test_buffers_are_pinned_when_the_configuration_says_so(
    scenario: Scenario, world_size: int, train: Train
) -> None:
    patched = train(scenario, world_size, patched=True)
    assert patched.buffers > 0
    assert patched.pinned == (patched.buffers if scenario.pin_memory else 0)
