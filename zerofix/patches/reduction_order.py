"""ZeRO-1/2 adds gradients of different parameters where ranks use different ones."""

from __future__ import annotations

import functools
from collections.abc import Callable

from zerofix.fix import Around, Fix, Target
from zerofix.patches.absent_grads import at_boundary, fill, is_left_alone, is_over

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zerofix.config import Training

_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


def _in_order(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_ready_partitions_and_remove_grads(self: Any, param: Any, i: int) -> Any:
        order = _order(self)
        if order is None or not param.numel():
            return original(self, param, i)
        # A gradient that is not whole comes again, and ZeRO-1 takes none before the boundary.
        if getattr(param, "ds_grad_is_ready", True) and (
            self.partition_gradients or at_boundary(self)
        ):
            order.ready(param)
        return None

    return reduce_ready_partitions_and_remove_grads


def _finishing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def independent_gradient_partition_epilogue(self: Any) -> Any:
        order = _order(self)
        if order is not None:
            order.finish()
        return original(self)

    return independent_gradient_partition_epilogue


def _filling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Without hooks ZeRO-1 reduces in the order of its groups, whatever has a gradient."""

    @functools.wraps(original)
    def reduce_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooked = self.overlap_comm or self.partition_gradients
        if not (hooked or is_left_alone(self) or is_over(self)):
            for group in self.bit16_groups:
                for param in group:
                    if param.requires_grad:
                        fill(self, param)
        return original(self, *args, **kwargs)

    return reduce_gradients


def _order(optimizer: Any) -> Any:
    """The optimizer's order; None where its ranks cannot disagree, or it is left alone."""
    # Zeros of a backward after the last would write over what that one wrote.
    if is_over(optimizer):
        return None
    if "reduction_order" not in optimizer.__dict__:
        from deepspeed import comm

        from zerofix.reduction_order import ReductionOrder

        group = optimizer.dp_process_group
        # Without hooks ZeRO-1 reduces in the order of its groups.
        alone = (
            comm.get_world_size(group=group) == 1
            or not (optimizer.partition_gradients or optimizer.overlap_comm)
            or is_left_alone(optimizer)
        )
        groups = {
            param: i
            for i, params in enumerate(optimizer.bit16_groups)
            for param in params
            if param.numel()
        }
        optimizer.reduction_order = (
            None
            if alone
            else ReductionOrder(
                # Last used, first to have a gradient.
                [param for param in reversed(optimizer.param_names) if param in groups],
                group,
                fill=functools.partial(fill, optimizer),
                reduce=lambda param: optimizer.reduce_independent_p_g_buckets_and_remove_grads(
                    param, groups[param]
                ),
            )
        )
    return optimizer.reduction_order


def _hit_by(training: Training) -> bool | str:
    return training.stage in (1, 2) and "if ranks use different parameters in a micro-batch"


FIX = Fix(
    name="reduction_order",
    title="ZeRO-1/2 reduces parameters in one order, whichever a rank uses",
    symptom=(
        "ZeRO-1 or ZeRO-2 where ranks use different parameters in the same micro-batch (a head or "
        "an adapter by task, dropped layers): gradients of different parameters are added to each "
        "other in silence, or the ranks hang."
    ),
    cause=(
        "A rank puts gradients into its bucket as they come, and buckets are reduced as if they "
        "had the same parameters in the same places on all ranks."
    ),
    upstream=(),
    introduced=None,
    fixed=None,
    hit_by=_hit_by,
    needs=("absent_grads",),
    on_request=(
        "it sends zeros for every parameter that a rank has no gradient of, and keeps gradients "
        "in memory until their turn comes"
    ),
    targets=(
        Target(f"{_OPTIMIZER}.reduce_ready_partitions_and_remove_grads", Around(_in_order)),
        Target(f"{_OPTIMIZER}.independent_gradient_partition_epilogue", Around(_finishing)),
        Target(f"{_OPTIMIZER}.reduce_gradients", Around(_filling)),
    ),
    limits=(
        "Of several backwards each of which is the last of a step, the first alone: the others "
        "are as on stock. The order is that of the first backward; what comes earlier than in it "
        "waits, at most the whole gradient of the model. With ZeRO-3 "
        "deepspeed.utils.set_z3_leaf_modules does the same."
    ),
)
