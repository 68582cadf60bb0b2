"""Gradients that were thrown away come back."""

from __future__ import annotations

import functools
from collections.abc import Callable

from zerofix.fix import Around, Fix, Target
from zerofix.patches.absent_grads import start_anew

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zerofix.config import Training

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note in which micro-step of the engine the last backward was."""

    @functools.wraps(original)
    def allreduce_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.last_reduced_micro_step = self.micro_steps
        return original(self, *args, **kwargs)

    return allreduce_gradients


def _forgetting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Throw away what backwards that no ``engine.step`` followed have summed up.

    After a step it stays as it is: who zeroes before every micro-batch means no harm.
    """

    @functools.wraps(original)
    def zero_grad(self: Any) -> Any:
        if self.__dict__.get("last_reduced_micro_step") == self.micro_steps:
            _forget(self.optimizer)
        return original(self)

    return zero_grad


def _forget(optimizer: Any) -> None:
    """Set the sums to zero, for who takes a step all the same finds them."""
    # Sums that ZenFlow and SuperOffload have begun to use are no longer here.
    if getattr(optimizer, "zenflow", False) or hasattr(optimizer, "superoffload_cpu_optimizer"):
        return
    if hasattr(optimizer, "clear_hp_grads"):  # BF16_Optimizer
        optimizer.clear_hp_grads()
        return
    if hasattr(optimizer, "partition_gradients"):
        optimizer.micro_step_id = -1
        sums = [*optimizer.averaged_gradients.values()]
        sums += getattr(optimizer, "all_grad_tensors", {}).values()
        masters = optimizer.single_partition_of_fp32_groups
        offload = optimizer.cpu_offload
    elif hasattr(optimizer, "grad_partitions_flat_buffer"):
        sums = [[optimizer.grad_partitions_flat_buffer]]
        masters = optimizer.fp32_partitioned_groups_flat
        offload = optimizer.offload_optimizer
    else:  # not ZeRO's own: it has no other sums than the gradients of the model
        return
    optimizer.zero_grad()
    start_anew(optimizer)
    optimizer.gradients_digest = 0
    if offload:
        optimizer.reset_cpu_buffers()
        sums.append([master.grad for master in masters if master.grad is not None])
    for tensors in sums:
        for tensor in tensors or ():
            tensor.zero_()


def _hit_by(training: Training) -> bool | str:
    sums = training.stage > 1 or training.bf16_optimizer
    return sums and "if engine.zero_grad() is to throw a backward away"


FIX = Fix(
    name="zero_grad",
    title="engine.zero_grad() throws away the sums of the backwards before it",
    symptom=(
        "ZeRO-2/3, or bf16 whose gradients are summed in fp32, and engine.zero_grad() after a "
        "backward instead of engine.step(), as for a batch with a loss that is not finite: its "
        "gradients are in the next step all the same."
    ),
    cause=(
        "engine.zero_grad() clears the gradients of the model, and ZeRO and BF16_Optimizer have "
        "their sums of them in buffers of their own."
    ),
    upstream=(),
    introduced=None,
    fixed=None,
    hit_by=_hit_by,
    targets=(
        Target(f"{_ENGINE}.allreduce_gradients", Around(_noting)),
        Target(f"{_ENGINE}.zero_grad", Around(_forgetting)),
    ),
    limits=(
        "After an engine.step() in the middle of an accumulation the sums stay, as in every "
        "release: the engine goes on counting micro-batches, and programs that zero gradients "
        "before each one would train on the last alone. Without an engine.step() between them "
        "(set_gradient_accumulation_boundary) they do so with this fix, as in plain torch."
    ),
)
