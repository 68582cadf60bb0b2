"""Frameworks that drive DeepSpeed: wrong on stock, right with `import zerofix`."""

from importlib import metadata

import pytest
from framework_training import FRAMEWORKS, worker
from packaging.version import Version
from processes import ask

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
