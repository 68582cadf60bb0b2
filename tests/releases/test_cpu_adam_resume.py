"""CPUAdam goes on from a checkpoint bit for bit."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from adam import ENGINE_POINTS, POINTS, Question, ask
from packaging.version import Version

STEPS_SUBGROUPS = Version("0.18.0") <= Version(version("deepspeed"))
ROADS = ["step", "step_subgroup"] if STEPS_SUBGROUPS else ["step"]
TRAININGS: list[Question] = [(count, road) for count in (1, 3) for road in ROADS]
STAGES: list[Question] = [(2,), (3,)]

Differences = dict[Question, dict[str, float]]


@pytest.fixture(scope="module", params=["zerofix", "stock"])
def resumed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, Differences]:
    """Whether on stock; difference at the end, by training and by the step it was resumed from."""
    stock = request.param == "stock"
    folder = str(tmp_path_factory.mktemp("saved"))
    engines = [Path(folder, f"zero{stage}") for (stage,) in STAGES]
    ask(
        [("save", folder, *training) for training in TRAININGS]
        + [("save_engine", folder, *stage) for stage in STAGES],
        stock=stock,
    )
    assert all(engine.exists() for engine in engines)
    answers = ask(
        [("resume", folder, *training) for training in TRAININGS]
        + [("resume_engine", folder, *stage) for stage in STAGES],
        stock=stock,
    )
    return stock, dict(zip(TRAININGS + STAGES, answers, strict=True))


@pytest.mark.parametrize("training", TRAININGS)
def test_a_resumed_training_is_that_without_interruption_from_every_point(
    training: Question, resumed: tuple[bool, Differences]
) -> None:
    stock, differences = resumed
    assert [int(point) for point in differences[training]] == list(POINTS)
    wrong = [point for point, error in differences[training].items() if error]
    assert len(wrong) > 20 if stock else wrong == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_engine_trains_as_without_interruption(
    stage: Question, resumed: tuple[bool, Differences]
) -> None:
    stock, differences = resumed
    assert [int(point) for point in differences[stage]] == list(ENGINE_POINTS)
    wrong = [point for point, error in differences[stage].items() if error]
    assert wrong if stock else wrong == []
