"""ZeRO-1/2 adds gradients of different parameters where ranks use different ones."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

from zerofix.fix import Around, Fix, Target
from zerofix.patches.absent_grads import at_boundary, fill, is_left_alone, is_over
from zerofix.settings import asks_for, toggle

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
        result = original(self)
        if not _ranks_differ(self) and self.compared_params:
            had_gradient = bytes(self.had_gradient[k] for k in self.compared_params)
            # ZeRO-1 reduces none before the last, and one rank may have more of those than another.
            if any(had_gradient):
                self.gradients_digest = zlib.crc32(had_gradient, self.gradients_digest)
        return result

    return independent_gradient_partition_epilogue


def _filling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Without hooks ZeRO-1 reduces in the order of its groups, whatever has a gradient."""

    @functools.wraps(original)
    def reduce_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _ranks_differ(self) and not (_has_hooks(self) or is_over(self)):
            for group in self.bit16_groups:
                for param in group:
                    fill(self, param)
        return original(self, *args, **kwargs)

    return reduce_gradients


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # In bf16 and fp32 not every release sets it anew, and checkpoints have it.
        if self.__dict__.pop("step_given_up", False):
            self.overflow = False
        return result

    return step


def _comparing(original: Callable[..., Any]) -> Callable[..., Any]:
    """The last moment at which a step can be given up, once a step on every rank."""

    @functools.wraps(original)
    def _update_scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not _ranks_differ(self) and self.compared_params:
            from zerofix.reduction_order import is_equal

            digest, self.gradients_digest = self.gradients_digest, 0
            if not is_equal(digest, self.dp_process_group):
                _begin(self)
        return result

    return _update_scale


def _begin(optimizer: Any) -> None:
    """Give up the step of this optimizer, and reduce in one order from the next on."""
    from zerofix.reduction_order import warn

    optimizer.ranks_differ = True
    # Ranks that hold other parts of the model would take the step, if theirs agree.
    alone = optimizer.model_parallel_world_size == 1
    if alone and not optimizer.overflow:
        optimizer.overflow = optimizer.step_given_up = True
    warn(
        optimizer.dp_process_group,
        f"This step {'changes nothing' if alone else 'may be wrong'}; from the next on "
        "reduction_order keeps them apart. "
        f"{toggle('reduction_order')}=1 has it do so from the first step on.",
    )


def _ranks_differ(optimizer: Any) -> bool:
    """Whether ranks have had gradients of different parameters, or the environment says so."""
    if "ranks_differ" not in optimizer.__dict__:
        from deepspeed import comm

        may_differ = comm.get_world_size(group=optimizer.dp_process_group) > 1
        may_differ = may_differ and not is_left_alone(optimizer)
        optimizer.ranks_differ = may_differ and asks_for("reduction_order")
        optimizer.gradients_digest = 0
        # Experts are reduced by groups of their own, what is empty is not.
        optimizer.compared_params = [
            optimizer.get_param_id(param)
            for group in optimizer.bit16_groups
            for param in group
            if param.numel() and may_differ and not optimizer.has_moe_layers
        ]
    return bool(optimizer.ranks_differ)


def _has_hooks(optimizer: Any) -> bool:
    return bool(optimizer.partition_gradients or optimizer.overlap_comm)


def _order(optimizer: Any) -> Any:
    """The order of this optimizer; None where it needs none."""
    # Zeros of a backward after the last would write over what that one wrote.
    if not _ranks_differ(optimizer) or not _has_hooks(optimizer) or is_over(optimizer):
        return None
    if "reduction_order" not in optimizer.__dict__:
        from zerofix.reduction_order import ReductionOrder

        groups = {
            param: i
            for i, params in enumerate(optimizer.bit16_groups)
            for param in params
            if param.numel()
        }
        optimizer.reduction_order = ReductionOrder(
            # Last used, first to have a gradient.
            [param for param in reversed(optimizer.param_names) if param in groups],
            optimizer.dp_process_group,
            fill=functools.partial(fill, optimizer),
            reduce=lambda param: optimizer.reduce_independent_p_g_buckets_and_remove_grads(
                param, groups[param]
            ),
        )
    return optimizer.reduction_order


def _modes() -> tuple[str, ...]:
    variable = toggle("reduction_order")
    if asks_for("reduction_order"):
        return ("from the first backward on",)
    return (f"once ranks have differed; with {variable}=1 from the first backward on",)


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
    targets=(
        Target(f"{_OPTIMIZER}.reduce_ready_partitions_and_remove_grads", Around(_in_order)),
        Target(f"{_OPTIMIZER}.independent_gradient_partition_epilogue", Around(_finishing)),
        Target(f"{_OPTIMIZER}.reduce_gradients", Around(_filling)),
        Target(f"{_OPTIMIZER}.step", Around(_stepping)),
        Target(f"{_OPTIMIZER}._update_scale", Around(_comparing)),
    ),
    limits=(
        "It compares the ranks, and begins when they differ: the step in which they do changes "
        "nothing (before 0.19.7 Muon's momentum all the same), or ends as on stock where their "
        "buckets differ in size (an error of gloo, or a hang). "
        "ZEROFIX_REDUCTION_ORDER=1 has it begin with the first backward, and with mixture of "
        "experts, where it does not compare, begin at all. Then a rank sends zeros for every "
        "parameter that it has no gradient of, and keeps gradients in memory until their turn "
        "comes, at most the whole gradient of the model; the order is that of the first backward. "
        "Of several backwards each of which is the last of a step, the first alone: the others are "
        "as on stock. With ZeRO-3 deepspeed.utils.set_z3_leaf_modules does the same."
    ),
    modes=_modes,
)
