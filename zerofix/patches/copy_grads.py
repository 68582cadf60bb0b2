"""ZeRO-1/2 with optimizer offload loses gradients of earlier backwards."""

from __future__ import annotations

import functools
from collections.abc import Callable

from zerofix.fix import Around, Edit, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zerofix.config import Training

_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


def _discarding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Forget the partial sums of an optimizer that goes back to a checkpoint."""

    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.partial_sums_in_cpu = set()
        return original(self, *args, **kwargs)

    return load_state_dict


def _discarding_of_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Forget the partial sums when the user throws the gradients away."""

    @functools.wraps(original)
    def zero_grad(self: Any) -> Any:
        if getattr(self.optimizer, "partial_sums_in_cpu", None):
            self.optimizer.partial_sums_in_cpu = set()
        return original(self)

    return zero_grad


def _hit_by(training: Training) -> bool | str:
    steps = training.gradient_accumulation_steps
    if training.stage != 2 or not training.offloads_optimizer:
        return False
    several = "2" if steps == 1 else "3"
    by_hand = "by set_gradient_accumulation_boundary"
    return steps > 2 or f"if a step has {several} or more backwards, {by_hand}"


FIX = Fix(
    name="copy_grads",
    title="optimizer offload sums the gradients of all backwards of a step",
    symptom=(
        "ZeRO-2 with offload_optimizer trains on part of the batch: with "
        "gradient_accumulation_steps=1 and several backwards a step "
        "(set_gradient_accumulation_boundary) only the last one counts, with "
        "gradient_accumulation_steps>2 the micro-batches between the first and the last are "
        "dropped."
    ),
    cause=(
        "The partial sum that ZeRO-2 keeps in CPU memory between backwards is used only when "
        "gradient_accumulation_steps>1, and only the first micro-batch is ever written to it."
    ),
    upstream=("#7981", "#7967"),
    introduced=None,
    fixed="0.19.0",
    hit_by=_hit_by,
    targets=(
        # A partial sum is needed when more backwards follow in this step, or went before.
        # ZeRO-1 comes here at the boundary only, with the whole sum in the gradient.
        Target(
            f"{_OPTIMIZER}.copy_grads_in_partition",
            Edit(
                find="self.gradient_accumulation_steps > 1",
                put=(
                    "not self.is_gradient_accumulation_boundary"
                    " or self.get_param_id(param) in getattr(self, 'partial_sums_in_cpu', ())"
                ),
            ),
        ),
        # A sum that has been used is no part of the next one. At the boundary the whole sum goes
        # on to the fp32 buffer: there is nothing to keep.
        Target(
            f"{_OPTIMIZER}.async_accumulate_grad_in_cpu_via_gpu",
            Edit(
                find="""
if self.micro_step_id > 0:
    accumulate_gradients()
else:
    copy_gradients_to_cpu()
""",
                put="""
partial_sums = self.__dict__.setdefault("partial_sums_in_cpu", set())
if param_id in partial_sums:
    accumulate_gradients()
    partial_sums.remove(param_id)
if not self.is_gradient_accumulation_boundary:
    copy_gradients_to_cpu()
    partial_sums.add(param_id)
""",
            ),
        ),
        # Runs at the end of a step, also of one that is skipped for an overflow: a parameter that
        # has no gradient at the boundary must not meet its sum in the next step.
        Target(
            f"{_OPTIMIZER}.reset_cpu_buffers",
            Edit(
                find="self.norm_for_param_grads = {}",
                put="self.norm_for_param_grads = {}\nself.partial_sums_in_cpu = set()",
            ),
        ),
        # Who starts a step and then throws it away must not meet it again.
        Target(f"{_OPTIMIZER}.load_state_dict", Around(_discarding)),
        Target("deepspeed.runtime.engine:DeepSpeedEngine.zero_grad", Around(_discarding_of_engine)),
    ),
)
