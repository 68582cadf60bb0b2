"""CPUAdam with zerofix is no farther from fp64 than without."""

from __future__ import annotations

import pytest
from adam import Question, answer

DISTANCES: list[Question] = [
    ("distance", {"weight_decay": 0.01}),
    ("distance", {"weight_decay": 0.01, "adamw_mode": False}),
]
SINGLE_STEPS: Question = ("distance_of_steps",)
QUESTIONS = [*DISTANCES, SINGLE_STEPS]


@pytest.mark.parametrize("question", DISTANCES, ids=["AdamW", "Adam"])
def test_the_distance_to_fp64_does_not_grow(question: Question) -> None:
    # Nearly all of it is the rounding of the weights, which takes chances.
    patched = answer(question, QUESTIONS, stock=False)
    assert patched <= 1.002 * answer(question, QUESTIONS, stock=True)


def test_single_steps_are_no_farther_from_fp64_than_those_of_stock() -> None:
    patched = answer(SINGLE_STEPS, QUESTIONS, stock=False)
    assert patched <= answer(SINGLE_STEPS, QUESTIONS, stock=True)
