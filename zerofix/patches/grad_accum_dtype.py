"""ZeRO-1 trains each rank on its own gradients where it sums them in another dtype."""

from __future__ import annotations

from zerofix.fix import Edit, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerofix.config import Training


def _hit_by(training: Training) -> bool | str:
    if training.stage != 1 or training.dtype == training.grad_accum_dtype:
        return False
    # Without offload DeepSpeed has another optimizer for bf16.
    offloads = training.dtype != "bf16" or training.offloads_optimizer
    return offloads and "with several ranks"


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
        "is added to it."
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
                return param.grad_accum
                """,
            ),
        ),
    ),
)
