"""CPUAdam gives the same step the same bits."""

from __future__ import annotations

import math
import random
from importlib.metadata import version
from itertools import product
from types import ModuleType
from typing import Any

import pytest
from adam import Question, answer
from packaging.version import Version

from zerofix.native_adam import Binding, bind_anew

RELEASE = Version(version("deepspeed"))
FIXED_UPSTREAM = Version("0.19.0") <= RELEASE
STEPS_SUBGROUPS = Version("0.18.0") <= RELEASE
ROADS = ["step", "step_subgroup", "both"] if STEPS_SUBGROUPS else ["step"]
DTYPES = [
    ("float32", "fp32"),
    ("bfloat16", "fp32"),
    ("bfloat16", "same"),
    ("float16", "fp32"),
    ("float16", "same"),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "adamw_mode": False},
]
UNCORRECTED: list[dict[str, Any]] = [
    {"bias_correction": False, "weight_decay": 0.1},
    {"bias_correction": False, "weight_decay": 0.1, "adamw_mode": False},
]

SUBGROUPS: list[Question] = [
    ("subgroups", road, *dtype, options) for road, dtype, options in product(ROADS, DTYPES, OPTIONS)
]
WITHOUT_CORRECTION: list[Question] = [
    ("subgroups", ROADS[-1], *dtype, options) for dtype, options in product(DTYPES, UNCORRECTED)
]
JUMPS: list[Question] = [("jumps", road, b) for road in ROADS[:2] for b in (False, True)]
TWO_GROUPS: Question = ("two_groups", 300)
SPLITS: list[Question] = [("split", 2), ("split", 3)]
LAYERS = ([], ["cpu_adam"], ["cpu_adam_resume"], ["cpu_adam", "cpu_adam_resume"])
QUESTIONS: list[Question] = [
    ("whole_steps",),
    *SUBGROUPS,
    *WITHOUT_CORRECTION,
    *JUMPS,
    TWO_GROUPS,
    *SPLITS,
    ("counted_in_place",),
    ("binding",),
    ("prebuilt",),
    # Last: they revert all fixes.
    *(("layers", fixes) for fixes in LAYERS),
]


def ask(question: Question, *, stock: bool) -> Any:
    return answer(question, QUESTIONS, stock=stock)


def for_each(questions: list[Question]) -> pytest.MarkDecorator:
    ids = [" ".join(map(str, question)) for question in questions]
    return pytest.mark.parametrize("question", questions, ids=ids)


@for_each([("whole_steps",), *SUBGROUPS, *WITHOUT_CORRECTION])
def test_equal_subgroups_stay_equal(question: Question) -> None:
    assert ask(question, stock=False) == 0.0


@for_each(JUMPS)
def test_equal_subgroups_stay_equal_through_jumps_rollbacks_and_other_betas(
    question: Question,
) -> None:
    assert ask(question, stock=False) == 0.0


def test_two_groups_of_different_betas_are_as_in_optimizers_of_their_own() -> None:
    assert ask(TWO_GROUPS, stock=False) == 0.0


@for_each(SPLITS)
def test_zero_trains_the_same_in_several_subgroups_as_in_one(question: Question) -> None:
    assert ask(question, stock=False) == 0.0


@for_each([("whole_steps",), *SUBGROUPS, *JUMPS, *SPLITS])
def test_stock_drifts_exactly_where_the_release_has_the_defect(question: Question) -> None:
    error = ask(question, stock=True)
    assert error == 0.0 if FIXED_UPSTREAM else 0.0 < error < math.inf


@for_each(WITHOUT_CORRECTION)
def test_stock_does_not_drift_without_bias_correction(question: Question) -> None:
    assert ask(question, stock=True) == 0.0


def test_stock_gives_two_groups_of_different_betas_other_bits_in_every_release() -> None:
    assert ask(TWO_GROUPS, stock=True) > 0.0


def test_nothing_but_adam_update_of_the_binding_is_new() -> None:
    seen = ask(("binding",), stock=False)
    assert seen["bound"]
    assert seen["names"]
    assert seen["differ"] == ["adam_update"]
    assert seen["is_module"]
    assert all(stock == patched is not None for stock, patched in seen["errors"])
    assert "ds_opt_adam" not in seen["optimizer"]


def test_a_prebuilt_operation_is_bound_as_well() -> None:
    assert ask(("prebuilt",), stock=False) == ["prebuilt", 0.0]


def test_stock_has_the_native_binding() -> None:
    assert not ask(("binding",), stock=True)["bound"]


def test_a_step_count_that_is_a_tensor_counted_in_place_is_seen_to_move() -> None:
    assert ask(("counted_in_place",), stock=False) == 0.0


@pytest.mark.parametrize(
    ("fixes", "layers"), list(zip(LAYERS, (0, 0 if FIXED_UPSTREAM else 1, 1, 1), strict=True))
)
def test_each_of_the_two_fixes_brings_the_binding_and_both_bring_it_once(
    fixes: list[str], layers: int
) -> None:
    assert ask(("layers", fixes), stock=False) == layers


class Native(ModuleType):
    """The native module's account of step, betas and power, of older and newer releases."""

    def __init__(self, *, newer: bool) -> None:
        super().__init__("cpu_adam")
        self.newer = newer
        self.calls = 0
        self.step, self.beta, self.power = 0, 0.9, 1.0

    def adam_update(self, optimizer_id: int, step: int, lr: float, beta: float, *_: Any) -> None:
        self.calls += 1
        if beta == self.beta and step == self.step + 1:
            self.power *= beta
        elif not (self.newer and beta == self.beta and step == self.step):
            self.power = beta**step
        self.step, self.beta = step, beta


@pytest.mark.parametrize("newer", [False, True])
def test_the_power_is_that_of_step_and_betas_after_any_calls(newer: bool) -> None:
    native = Native(newer=newer)
    bound, drawn = Binding(native), random.Random(0)
    step, beta = 0, 0.9
    for _ in range(5000):
        step = drawn.choice([step, step + 1, step + 1, step + 1, drawn.randrange(1, 100)])
        beta = beta if drawn.random() < 0.9 else drawn.choice([0.8, 0.9])
        bound.adam_update(7, step, 1e-3, beta, 0.999)
        assert native.power == beta**step
        if drawn.random() < 0.02:  # created again under the same id
            native.step, native.beta, native.power = 0, 0.9, 1.0


def test_the_first_subgroup_of_a_step_takes_one_call_more_and_the_others_none() -> None:
    native = Native(newer=False)
    bound = Binding(native)
    for step in range(1, 11):
        for _ in range(5):
            bound.adam_update(0, step, 1e-3, 0.9, 0.999)
    assert native.calls == 10 * (5 + 1)


def test_a_binding_that_is_no_module_is_left_alone() -> None:
    class Optimizer:
        @bind_anew
        def __init__(self, binding: object) -> None:
            self.ds_opt_adam = binding

    other = object()
    assert Optimizer(other).ds_opt_adam is other
