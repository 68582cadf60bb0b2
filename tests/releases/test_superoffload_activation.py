"""When the fixes of SuperOffload are applied, also where a release has no SuperOffload."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version
from processes import answer

RELEASE = Version(version("deepspeed"))
HAS_IT = Version("0.18.0") <= RELEASE
REWRITTEN = Version("0.18.9") <= RELEASE


def test_they_wait_for_superoffload_where_there_is_one() -> None:
    before, after, inherited = answer(
        """
import contextlib, json
import zerofix
import deepspeed
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

def states():
    status = zerofix.status()
    assert status.ok
    return [status[name].state.value for name in ("superoffload", "superoffload_step")]

inherited, before = Stage3.destroy, states()
with contextlib.suppress(ModuleNotFoundError):
    from deepspeed.runtime.superoffload import superoffload_stage3
print(json.dumps([before, states(), inherited is not Stage3.destroy]))
"""
    )
    if not HAS_IT:
        assert before == after == ["not-affected", "not-affected"]
    else:
        assert before == ["pending", "pending"]
        assert after == (
            ["fixed-upstream", "applied"] if REWRITTEN else ["applied", "not-affected"]
        )
    # Who does not use it has nothing changed.
    assert inherited == HAS_IT
