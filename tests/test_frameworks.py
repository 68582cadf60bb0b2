"""Frameworks that drive DeepSpeed: wrong on stock, right with `import zerofix`."""

import re
from importlib import metadata

import pytest
from framework_training import FRAMEWORKS, worker
from packaging.version import Version
from processes import ask, python

HAS_COPY_GRADS = Version(metadata.version("deepspeed")) < Version("0.19.0")
TOLERANCE = 2e-6


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gradients_of_all_micro_batches_count_under_a_framework(framework):
    def error(place, *, patched):
        error, said = ask(worker, (framework, place), 1, patched=patched, timeout=120)
        assert "too late" not in said
        return error

    stock = error("first", patched=False)
    assert stock > 1e-2 if HAS_COPY_GRADS else stock < TOLERANCE
    assert error("first", patched=True) < TOLERANCE
    # Frameworks, arguments, strategy and process group are there already.
    assert error("last", patched=True) < TOLERANCE


# Which import comes too late, and what does not.

WORLD = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
WORLD |= {"MASTER_PORT": "0"}
ENGINE = """
import deepspeed, torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Linear(2, 2)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.Adam(model.parameters()),
    config={"train_batch_size": 1, "zero_optimization": {"stage": 2}},
)
kept = type(engine.optimizer).reduce_ipg_grads
"""
ADAM = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
adam = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(2))])
"""


def said(program, **variables):
    """How the program ends, and its lines on an import that is too late."""
    done = python(program, **WORLD, **variables)
    return done.returncode, [line for line in done.stderr.splitlines() if "too late" in line]


@pytest.mark.parametrize(
    ("before", "found"),
    [(ENGINE, ["DeepSpeedZeroOptimizer", "__main__.kept"]), (ADAM, ["DeepSpeedCPUAdam"])],
    ids=["engine", "optimizer"],
)
def test_an_import_after_what_keeps_deepspeeds_code_is_warned_of_once(before, found):
    program = before + "import zerofix"
    code, (line,) = said(program)
    assert code == 0
    assert line.startswith(f"zerofix: imported too late, at <string>:{len(program.splitlines())}. ")
    assert all(re.search(rf"for certain: .*\b{name}\b.*\. Import zero", line) for name in found)


def test_it_is_an_error_where_zerofix_is_strict():
    code, (line,) = said(ENGINE + "import zerofix", ZEROFIX_STRICT="1")
    assert code == 1
    assert "zerofix.install.NotAppliedError: zerofix: imported too late, at " in line
