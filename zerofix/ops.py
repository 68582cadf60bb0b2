"""How the native operations of the installed DeepSpeed come to be."""

from __future__ import annotations

from typing import Literal


def origin(op: str) -> Literal["prebuilt", "jit"]:
    """Whether DeepSpeed loads an operation as it was installed, or compiles it on first use.

    Needs an imported DeepSpeed, and loads nothing.

    Args:
        op: the builder's name of it, such as ``"cpu_adam"``.
    """
    from deepspeed import git_version_info
    from deepspeed.accelerator import get_accelerator

    # Both are what OpBuilder.load asks: operations are installed for one kind of accelerator.
    installed = git_version_info.installed_ops.get(op, False)
    here = git_version_info.accelerator_name == get_accelerator()._name
    return "prebuilt" if installed and here else "jit"
