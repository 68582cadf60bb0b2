"""What the fixes of SuperOffload put into the classes of DeepSpeed."""

from __future__ import annotations

import functools
from collections.abc import Callable

from zerofix.fix import Around, Replace, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zerofix.superoffload.speculation import Speculation

SUPEROFFLOAD = "deepspeed.runtime.superoffload.superoffload_stage3:SuperOffloadOptimizer_Stage3"
_ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


def plain(name: str) -> Replace:
    """Do as plain offload: the method of this name that SuperOffload's class overrides."""

    def body(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_zero_3(), name)(self, *args, **kwargs)

    return Replace(body)


def _zero_3() -> Any:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return DeepSpeedZeroOptimizer_Stage3


def start(
    self: Any,
    module: Any,
    init_optimizer: Any,
    param_names: Any,
    timers: Any,
    ds_config: Any,
    **kwargs: Any,
) -> None:
    """Plain offload's constructor, then the worker."""
    from zerofix.superoffload.speculation import Speculation

    _zero_3().__init__(self, module, init_optimizer, param_names, timers, ds_config, **kwargs)
    self.superoffload_cpu_optimizer = Speculation(self, kwargs.get("cpuadam_cores_perc", 0.8))


def _speculation(optimizer: Any) -> Speculation | None:
    """Not of other ZeRO-3 optimizers, nor of one made before the fix was applied."""
    from zerofix.superoffload.speculation import Speculation

    found = getattr(optimizer, "superoffload_cpu_optimizer", None)
    return found if isinstance(found, Speculation) else None


def _partitioning(original: Callable[..., Any]) -> Callable[..., Any]:
    """Plain offload's, then begin the steps of the subgroups that are complete."""

    @functools.wraps(original)
    def partition_grads(self: Any, params_to_release: Any, grad_partitions: Any) -> Any:
        speculation = _speculation(self)
        if speculation is None:
            return original(self, params_to_release, grad_partitions)
        buffers = _zero_3().partition_grads(self, params_to_release, grad_partitions)
        speculation.arrived(params_to_release)
        return buffers

    return partition_grads


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Plain offload's, which asks for the norm, the scale and each subgroup's step in turn."""

    @functools.wraps(original)
    def step(self: Any, closure: Any = None) -> Any:
        speculation = _speculation(self)
        if speculation is None:
            return original(self, closure)
        speculation.begin()
        try:
            _zero_3().step(self, closure)
        finally:  # it raises when the loss scale cannot become smaller, among others
            speculation.end_step()
        return None

    return step


def _taking(original: Callable[..., None]) -> Callable[..., None]:
    """Take the worker's step, or do plain offload's."""

    @functools.wraps(original)
    def _optimizer_step(self: Any, sub_group_id: int) -> None:
        speculation = _speculation(self)
        if speculation is None:
            original(self, sub_group_id)
        elif not speculation.take(sub_group_id):
            _zero_3()._optimizer_step(self, sub_group_id)

    return _optimizer_step


def _scaling(original: Callable[..., None]) -> Callable[..., None]:
    """Know what the gradients are divided by before the first of them is."""

    @functools.wraps(original)
    def unscale_and_clip_grads(self: Any, sub_group_id: int, total_norm: Any) -> None:
        if speculation := _speculation(self):
            speculation.scale(original, sub_group_id, total_norm)
        else:
            original(self, sub_group_id, total_norm)

    return unscale_and_clip_grads


def _closing(original: Callable[..., Any]) -> Callable[..., Any]:
    """End the worker with its optimizer."""

    @functools.wraps(original)
    def destroy(self: Any) -> Any:
        try:
            return original(self)
        finally:
            if speculation := _speculation(self):
                speculation.close()

    return destroy


def _changing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let weights, gradients and states be written to between backward and step."""

    @functools.wraps(original)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if speculation := _speculation(self):
            speculation.change()
        return original(self, *args, **kwargs)

    return write


TARGETS = (
    Target(f"{SUPEROFFLOAD}.partition_grads", Around(_partitioning)),
    Target(f"{SUPEROFFLOAD}.step", Around(_stepping)),
    Target(f"{SUPEROFFLOAD}._optimizer_step", Around(_taking)),
    # What SuperOffload inherits. Other optimizers of the class go on as before.
    Target(f"{_ZERO_3}.unscale_and_clip_grads", Around(_scaling)),
    Target(f"{_ZERO_3}.destroy", Around(_closing)),
    *(
        Target(f"{_ZERO_3}.{setter}", Around(_changing))
        for setter in (
            "set_full_hp_param",
            "set_local_hp_param",
            "set_fp32_grad_for_param",
            "set_local_grad_for_param",
            "update_fp32_grad_for_param_vectorized",
            "load_state_dict",
            "refresh_fp32_params",
        )
    ),
)
"""The road of a step, the same in every release."""
