"""ZeRO-3 goes wrong where a parameter has no gradient."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

from zerofix.fix import Around, Edit, Fix, Target
from zerofix.patches.absent_grads import at_boundary, start_anew

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zerofix.config import Training

_OPTIMIZER = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note which parameters have had a gradient in this step, and in its last backward."""

    @functools.wraps(original)
    def partition_grads(self: Any, params_to_release: Any, grad_partitions: Any) -> Any:
        passed_on = self.__dict__.setdefault("passed_on", {})
        boundary = at_boundary(self)
        passed_on.update([(param.ds_id, boundary) for param in params_to_release])
        # Experts are reduced by groups of their own.
        reduced = [param.ds_id for param in params_to_release if getattr(param, "allreduce", True)]
        digest = self.__dict__.get("gradients_digest", 0)
        self.gradients_digest = zlib.crc32(str(reduced).encode(), digest)
        return original(self, params_to_release, grad_partitions)

    return partition_grads


def _comparing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _pre_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        start_anew(self)
        _warn_if_ranks_differ(self)
        return original(self, *args, **kwargs)

    return _pre_step


def _warn_if_ranks_differ(optimizer: Any) -> None:
    """Compare which parameters were reduced together in this step; after a warning no more."""
    from deepspeed import comm

    from zerofix.reduction_order import is_equal, warn

    group = optimizer.dp_process_group
    if "ranks_differ" in optimizer.__dict__ or comm.get_world_size(group=group) == 1:
        return
    digest = optimizer.__dict__.pop("gradients_digest", 0)
    if not is_equal(digest, group):
        optimizer.ranks_differ = True
        warn(
            group,
            "What ZeRO-3 trains may be wrong; deepspeed.utils.set_z3_leaf_modules keeps apart "
            "those of one module.",
        )


def include_absent(optimizer: Any) -> None:
    """Take parameters without a gradient in this backward for ones with a gradient of zero.

    Called when all others are reduced.
    """
    import torch
    from deepspeed.accelerator import get_accelerator

    passed_on = optimizer.__dict__.get("passed_on")
    # SuperOffload comes by here with the fixes of its own only; ZenFlow has a schedule of its own.
    if not passed_on or getattr(optimizer, "zenflow", False):
        return
    # The first backward of a step writes over the sum of the step before, and with offload the
    # last one passes the sum on. Between them a sum stays as it is.
    passes_on = optimizer.offload_optimizer and at_boundary(optimizer)
    absent = [
        param
        for group in optimizer.fp16_groups
        for param in group
        if param.ds_id not in passed_on or (passes_on and not passed_on[param.ds_id])
    ]
    if not absent:
        return
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    zero = torch.zeros((), dtype=optimizer.gradient_accumulation_dtype, device=device)
    # The stream of all other writes to the sums.
    with accelerator.stream(optimizer.reduce_and_partition_stream):
        for param in absent:
            param.grad = torch.empty_like(param.data)  # some releases want one to free
        optimizer.partition_grads(absent, [zero.expand(p.partition_numel()) for p in absent])
    if not accelerator.resolves_data_dependency():
        optimizer.reduce_and_partition_stream.synchronize()


def _hit_by(training: Training) -> bool | str:
    return training.stage == 3 and "if a parameter has no gradient in some micro-batch or step"


FIX = Fix(
    name="absent_grads_zero3",
    title="ZeRO-3 takes a missing gradient for zero",
    symptom=(
        "ZeRO-3, with or without offload, and parameters that have no gradient in some "
        "micro-batches or steps (conditional layers, several heads, adapters): their last "
        "gradient is applied again, or the sum of the step before is added to theirs; with "
        "offload_optimizer, what they had before the last micro-batch of a step is lost. After a "
        "non-finite gradient every later step is skipped, or weights become NaN."
    ),
    cause=(
        "The buffer of a parameter's summed gradient is overwritten only by a gradient in the "
        "first micro-batch of a step, and copied to the offloaded optimizer only by one in the "
        "last."
    ),
    upstream=(),
    introduced=None,
    fixed=None,
    hit_by=_hit_by,
    targets=(
        Target(f"{_OPTIMIZER}.partition_grads", Around(_noting)),
        Target(f"{_OPTIMIZER}._pre_step", Around(_comparing)),
        Target(
            f"{_OPTIMIZER}.independent_gradient_partition_epilogue",
            Edit(
                find="""
for param_id in self.params_already_reduced.keys():
    self.params_already_reduced[param_id] = False
""",
                put="""
for param_id in self.params_already_reduced.keys():
    self.params_already_reduced[param_id] = False
from zerofix.patches.absent_grads_zero3 import include_absent
include_absent(self)
""",
            ),
        ),
    ),
    limits=(
        "SuperOffload is reached where superoffload or superoffload_step is applied. Where ranks "
        "use different parameters of a module in a micro-batch, ZeRO-3 adds the gradients of one "
        "to those of another, unless the module is a leaf: deepspeed.utils.set_z3_leaf_modules. It "
        "warns of that."
    ),
)
