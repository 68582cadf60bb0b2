"""ZeRO-3 adds gradients of different parameters where ranks use different ones."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from zerofix.fix import Around, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_OPTIMIZER = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


def _in_order(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_ready_partitions_and_remove_grads(self: Any, param: Any) -> Any:
        order = _order(self)
        if order is None or getattr(self, "_coalesce_grad_reduction", False):
            return original(self, param)
        if getattr(param, "ds_grad_is_ready", True):  # or it comes again
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


def _order(optimizer: Any) -> Any:
    """The optimizer's order; None where its ranks cannot disagree, and for ZenFlow."""
    if "reduction_order" not in optimizer.__dict__:
        from deepspeed import comm

        from zerofix.reduction_order import ReductionOrder

        group = optimizer.dp_process_group
        alone = comm.get_world_size(group=group) == 1 or getattr(optimizer, "zenflow", False)
        trained = [p for params in optimizer.fp16_groups for p in params if p.requires_grad]
        optimizer.reduction_order = None
        if not alone:
            optimizer.reduction_order = ReductionOrder(
                # Last made, first to have a gradient.
                sorted(trained, key=operator.attrgetter("ds_id"), reverse=True),
                group,
                fill=_fill,
                reduce=optimizer.reduce_independent_p_g_buckets_and_remove_grads,
            )
    return optimizer.reduction_order


def _fill(param: Any) -> None:
    """Give a parameter a gradient of zero and of its whole shape, gathered or not."""
    import torch

    if param.grad is None:
        zeros = torch.zeros(param.ds_shape, dtype=param.dtype, device=param.device)
        held = param.data
        param.data = zeros  # a gradient must have the shape of its parameter
        param.grad = zeros
        param.data = held


FIX = Fix(
    name="reduction_order_zero3",
    title="ZeRO-3 reduces parameters in one order, whichever a rank uses",
    symptom=(
        "ZeRO-3 where ranks have gradients of different parameters in the same micro-batch: "
        "gradients of different parameters are added to each other in silence, or the ranks hang."
    ),
    cause=(
        "A rank puts gradients into its bucket as they come, and buckets are reduced as if they "
        "had the same parameters on all ranks."
    ),
    upstream=(),
    introduced=None,
    fixed=None,
    targets=(
        Target(f"{_OPTIMIZER}.reduce_ready_partitions_and_remove_grads", Around(_in_order)),
        Target(f"{_OPTIMIZER}.independent_gradient_partition_epilogue", Around(_finishing)),
    ),
    limits=(
        "A module that does not run on all ranks hangs in forward, where ZeRO-3 gathers its "
        "parameters: see set_z3_leaf_modules of DeepSpeed."
    ),
)
