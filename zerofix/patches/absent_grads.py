"""ZeRO-1/2 goes wrong where a parameter has no gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable

from zerofix.fix import Around, Edit, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zerofix.config import Training

_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


def include_absent(optimizer: Any) -> None:
    """Take parameters without a gradient in this backward for ones with a gradient of zero.

    Called when all others are reduced, and before it is forgotten which those were.
    """
    if is_left_alone(optimizer):
        return
    boundary = at_boundary(optimizer)
    reduced = optimizer.params_already_reduced
    optimizer.had_gradient = list(reduced)  # for reduction_order
    passed_on = optimizer.__dict__.setdefault("passed_on", [None] * len(reduced))
    if not all(reduced):
        absent = [
            (i, param)
            for i, group in enumerate(optimizer.bit16_groups)
            for param in group
            if param.numel() and not reduced[optimizer.get_param_id(param)]
        ]
        hooked_at_boundary = optimizer.overlap_comm and not optimizer.partition_gradients
        if hooked_at_boundary and boundary and not is_over(optimizer):
            _reduce(absent, optimizer)
            absent = [each for each in absent if not reduced[optimizer.get_param_id(each[1])]]
        # Without offload the missing gradients of a partition are zero already; ZeRO-1 passes
        # nothing on before the boundary.
        if optimizer.cpu_offload and (boundary or optimizer.partition_gradients):
            _zero([param for _, param in absent], optimizer, passed_on, boundary)
    for k, present in enumerate(reduced):
        if present or not passed_on[k]:
            passed_on[k] = boundary
    optimizer.step_is_over = boundary or is_over(optimizer)


def _reduce(absent: list[tuple[int, Any]], optimizer: Any) -> None:
    """What has its gradient from an earlier backward had no hook to reduce it in this one.

    On another rank it may have none at all.
    """
    before = (optimizer.get_gradient_for_reduction(param) is not None for _, param in absent)
    if optimizer.gradient_accumulation_steps == 1 and not any(before):
        return
    for i, param in absent:
        if param.requires_grad:
            fill(optimizer, param)
            optimizer.reduce_independent_p_g_buckets_and_remove_grads(param, i)
    optimizer.reduce_ipg_grads()


def _zero(absent: list[Any], optimizer: Any, passed_on: list[bool | None], boundary: bool) -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    overlap = optimizer.overlap_comm
    # The stream that copies the others, for they share a buffer.
    with accelerator.stream(
        optimizer.reduction_stream if overlap else accelerator.current_stream()
    ):
        for param in absent:
            k = optimizer.get_param_id(param)
            if not optimizer.is_param_in_current_partition[k]:
                continue
            if passed_on[k] is None and k in optimizer.accumulated_grads_in_cpu:
                optimizer.accumulated_grads_in_cpu[k].zero_()  # the sum of the step before
            # Between the first backward of a step and the last, a partial sum stays as it is.
            if passed_on[k] is None or (boundary and not passed_on[k]):
                fill(optimizer, param)
                optimizer.copy_grads_in_partition(param)
                optimizer.clear_grad_attribute(param)


def is_over(optimizer: Any) -> bool:
    """Whether an earlier backward was the last of this step.

    Where each loss of a step has a backward, and nobody sets the boundary, every one of them is
    the last: zeros of a later one must not be written over what an earlier one wrote.
    """
    return bool(optimizer.__dict__.get("step_is_over"))


def start_anew(optimizer: Any) -> None:
    """Take the next backward for the first of a step."""
    optimizer.__dict__.pop("passed_on", None)
    optimizer.__dict__.pop("step_is_over", None)


def _starting_anew(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        start_anew(self)
        return original(self, *args, **kwargs)

    return step


def at_boundary(optimizer: Any) -> bool:
    """Whether this backward is the last of its step."""
    boundary = optimizer.is_gradient_accumulation_boundary
    return bool(boundary() if callable(boundary) else boundary)


def is_left_alone(optimizer: Any) -> bool:
    """Whether missing gradients are somebody else's to treat."""
    # ZenFlow has a schedule of its own; the others want DeepSpeed's assertion.
    return getattr(optimizer, "zenflow", False) or (
        optimizer.cpu_offload and not optimizer.ignore_unused_parameters
    )


def fill(optimizer: Any, param: Any) -> None:
    """Give a parameter a gradient of zero, where it has none."""
    import torch

    if optimizer.get_gradient_for_reduction(param) is None:
        if optimizer.use_grad_accum_attribute:
            dtype = optimizer.gradient_accumulation_dtype
            param.grad_accum = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        else:
            param.grad = torch.zeros_like(param)


def _hit_by(training: Training) -> bool | str:
    if training.stage in (1, 2) and training.offloads_optimizer:
        return "if a parameter has no gradient in some micro-batch or step"
    if training.bf16_optimizer:
        return "if ranks use different parameters in a step"
    several = training.gradient_accumulation_steps > 1
    return (
        training.stage == 1
        and training.overlap_comm
        and several
        and "if a parameter has no gradient in the last micro-batch of a step, with several ranks"
    )


FIX = Fix(
    name="absent_grads",
    title="ZeRO-1/2 takes a missing gradient for zero",
    symptom=(
        "ZeRO-1/2 with offload_optimizer, and parameters that have no gradient in some "
        "micro-batches or steps (conditional layers, several heads, adapters): their last "
        "gradient is applied again, the sum of the step before is added to theirs, or what they "
        "had before the last micro-batch of a step is lost. After a non-finite gradient every "
        "later step is skipped, or weights become NaN. ZeRO-1 without offload, with overlap_comm, "
        "gradient accumulation and several ranks: the gradients of a parameter without one in the "
        "last micro-batch are not reduced. bf16 with ZeRO-1 and sums in fp32, where ranks use "
        "different parameters: each rank clips by a norm of its own."
    ),
    cause=(
        "What is done for a gradient is done from its hook alone. For a parameter whose hook does "
        "not run, nobody zeroes its part of the fp32 gradient, starts its partial sum anew, or "
        "passes that sum on. BF16_Optimizer leaves out of the norm what a rank had no gradient of, "
        "though others had."
    ),
    upstream=(),
    introduced=None,
    fixed=None,
    hit_by=_hit_by,
    targets=(
        Target(
            f"{_OPTIMIZER}.independent_gradient_partition_epilogue",
            Edit(
                find="""
for i in range(len(self.params_already_reduced)):
    self.params_already_reduced[i] = False
""",
                put="""
from zerofix.patches.absent_grads import include_absent
include_absent(self)
for i in range(len(self.params_already_reduced)):
    self.params_already_reduced[i] = False
""",
            ),
        ),
        Target(f"{_OPTIMIZER}.step", Around(_starting_anew)),
        Target(
            "deepspeed.runtime.bf16_optimizer:BF16_Optimizer.get_grads_for_norm",
            # A parameter without a gradient on this rank may have one that others reduced.
            Edit(find="if not self.fp32_groups_has_gradients[i][j]:\n    continue", put="pass"),
        ),
    ),
    limits=(
        "Ranks that use different parameters are for reduction_order. ZeRO-1 with overlap_comm and "
        "gradient accumulation sends zeros for parameters that have none in the last micro-batch."
    ),
)
