"""ZeRO-2 without offload keeps the last micro-batch only."""

from __future__ import annotations

from zerofix.fix import Edit, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerofix.config import Training


def _hit_by(training: Training) -> bool | str:
    if training.stage != 2 or training.offloads_optimizer:
        return False
    by_hand = "if a step has several backwards, by set_gradient_accumulation_boundary"
    return training.gradient_accumulation_steps > 1 or by_hand


FIX = Fix(
    name="grad_accumulation",
    title="ZeRO-2 without offload sums the gradients of all micro-batches",
    symptom=(
        "ZeRO-2 without offload and with gradient accumulation trains on the last micro-batch "
        "of each step alone."
    ),
    cause=(
        "Since #7509 the accumulated gradients are in all_grad_tensors, but whether there are "
        "any is still asked of averaged_gradients, which stays empty until the boundary."
    ),
    upstream=("#7509",),
    introduced="0.17.6",
    fixed="0.18.3",
    hit_by=_hit_by,
    targets=(
        Target(
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
            ".independent_gradient_partition_epilogue",
            Edit(
                find="not i in self.averaged_gradients or self.averaged_gradients[i] is None",
                put="self.all_grad_tensors.get(i) is None",
            ),
        ),
    ),
)
