"""ZeRO-1 trains each rank on its own gradients where it sums them in another dtype."""

from __future__ import annotations

from zerofix.fix import Edit, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerofix.config import Training


def _hit_by(training: Training) -> bool | str:
    if training.stage != 1 or training.dtype == training.grad_accum_dtype:
        return False
    # Without offload to a CPU DeepSpeed has another optimizer for bf16.
    sharded = training.dtype != "bf16" or training.offloads_to_cpu
    return sharded and "with several ranks"


FIX = Fix(
    name="grad_accum_dtype",
    title="ZeRO-1 trains on reduced gradients where it sums them in fp32",
    symptom=(
        "ZeRO-1 with data_types.grad_accum_dtype fp32 and a model in fp16, or in bf16 with "
        "offload: each rank updates its part of the weights from its own batches alone."
    ),
    cause=(
        "What is reduced is a copy of the sum in the dtype of the model, and what the optimizer "
        "steps on is the sum. Up to 0.16.4 overlap_comm also reduces before the last micro-batch "
        "is added to it, which without gradient accumulation ends in an error."
    ),
    upstream=(),
    introduced=None,
    fixed="0.19.8",
    hit_by=_hit_by,
    targets=(
        Target(
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
            ".get_gradient_for_reduction",
            Edit(
                find="""
                return param.grad_accum.to(self.dtype) if param.grad_accum is not None else None
                """,
                put="""
                if param.grad is not None:
                    grad = param.grad.to(self.gradient_accumulation_dtype)
                    if param.grad_accum is not None:
                        grad += param.grad_accum
                    param.grad_accum = grad
                    param.grad = None
                # One rank has nothing to reduce, and no need of what rounds the sum.
                if dist.get_world_size(group=self.dp_process_group) == 1:
                    return param.grad_accum.to(self.dtype) if param.grad_accum is not None else None
                return param.grad_accum
                """,
            ),
        ),
    ),
    limits=(
        "Sums are rounded to the dtype of the model before they are reduced, as in 0.19.8, and "
        "after that too where communication_data_type is fp32. From 0.18.5 on the last bucket "
        "stays in memory until the next forward, as in 0.19.8; the sums that stayed there before "
        "no longer do. Of several backwards each of which is the last of a step, the sum is of "
        "different ranks in part, as in 0.19.8. On a CPU with contiguous_gradients false and "
        "without offload nothing is reduced, as on stock before 0.19.8."
    ),
)
