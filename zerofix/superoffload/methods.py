"""What the fixes of SuperOffload put into the classes of DeepSpeed."""

from __future__ import annotations

import functools
from collections.abc import Callable

from zerofix.fix import Around, Replace, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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


def _partition_grads(self: Any, params_to_release: Any, grad_partitions: Any) -> Any:
    """Plain offload's, then begin the steps of the subgroups that are complete."""
    parameters = list(params_to_release)
    buffers = _zero_3().partition_grads(self, params_to_release, grad_partitions)
    self.superoffload_cpu_optimizer.arrived(parameters)
    return buffers


def _step(self: Any, closure: Any = None) -> None:
    """Plain offload's, which asks for the norm, the scale and each subgroup's step in turn."""
    self.superoffload_cpu_optimizer.begin()
    _zero_3().step(self, closure)
    self.superoffload_cpu_optimizer.end_step()


def _optimizer_step(self: Any, sub_group_id: int) -> None:
    """Take the worker's step, or do plain offload's."""
    if not self.superoffload_cpu_optimizer.take(sub_group_id):
        _zero_3()._optimizer_step(self, sub_group_id)


def _scaling(original: Callable[..., None]) -> Callable[..., None]:
    """Know what the gradients are divided by before the first of them is."""

    @functools.wraps(original)
    def unscale_and_clip_grads(self: Any, sub_group_id: int, total_norm: Any) -> None:
        if speculation := getattr(self, "superoffload_cpu_optimizer", None):
            speculation.scale(original, sub_group_id, total_norm)
        else:
            original(self, sub_group_id, total_norm)

    return unscale_and_clip_grads


def _closing(original: Callable[..., Any]) -> Callable[..., Any]:
    """End the worker with its optimizer."""

    @functools.wraps(original)
    def destroy(self: Any) -> Any:
        if speculation := getattr(self, "superoffload_cpu_optimizer", None):
            speculation.close()
        return original(self)

    return destroy


def _changing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the user write to weights, gradients and states between backward and step."""

    @functools.wraps(original)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if speculation := getattr(self, "superoffload_cpu_optimizer", None):
            speculation.change()
        return original(self, *args, **kwargs)

    return write


TARGETS = (
    Target(f"{SUPEROFFLOAD}.partition_grads", Replace(_partition_grads)),
    Target(f"{SUPEROFFLOAD}.step", Replace(_step)),
    Target(f"{SUPEROFFLOAD}._optimizer_step", Replace(_optimizer_step)),
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
        )
    ),
)
"""The road of a step, the same in every release."""
