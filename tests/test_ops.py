"""How the native operations of the installed DeepSpeed come to be."""

import sys
from types import ModuleType

import pytest
from processes import answer

from zerofix.ops import origin


def test_an_ordinary_installation_compiles_cpu_adam_on_first_use() -> None:
    program = """
import deepspeed, json, sys
from zerofix.ops import origin
from deepspeed.git_version_info import installed_ops
print(json.dumps([origin("cpu_adam"), installed_ops["cpu_adam"], "cpu_adam" in sys.modules]))
"""
    assert answer(program) in (["jit", False, False], ["prebuilt", True, False])


@pytest.mark.parametrize(
    ("installed", "built_for", "expected"),
    [
        ({"cpu_adam": True}, "cuda", "prebuilt"),
        ({"cpu_adam": True}, "cpu", "jit"),
        ({"cpu_adam": False}, "cuda", "jit"),
        ({}, "cuda", "jit"),
    ],
)
def test_prebuilt_is_what_was_built_for_this_accelerator(
    installed: dict[str, bool],
    built_for: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package, info, accelerator, cuda = (ModuleType(name) for name in "abcd")
    vars(info).update(installed_ops=installed, accelerator_name=built_for)
    vars(cuda).update(_name="cuda")
    vars(accelerator).update(get_accelerator=lambda: cuda)
    vars(package).update(git_version_info=info)
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", accelerator)
    assert origin("cpu_adam") == expected
