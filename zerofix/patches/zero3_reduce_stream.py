"""ZeRO-3 copies a gradient before it is there."""

from __future__ import annotations

from zerofix.fix import Edit, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerofix.config import Training


def _hit_by(training: Training) -> bool | str:
    if training.stage != 3 or not training.overlap_comm:
        return False
    return "if gradients come from several streams, as under torch.compile"


FIX = Fix(
    name="zero3_reduce_stream",
    title="ZeRO-3 waits for the stream that made a gradient before it reduces it",
    symptom=(
        "ZeRO-3 with overlap_comm on a GPU where gradients are not made on the default stream, as "
        "under torch.compile or in a model that uses streams itself: the training is wrong in "
        "silence."
    ),
    cause=(
        "The stream that copies and reduces a gradient waits for the default stream, and not for "
        "the stream that the gradient's hook runs on."
    ),
    upstream=("#7898",),
    introduced=None,
    fixed="0.18.8",
    hit_by=_hit_by,
    targets=(
        Target(
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.__add_grad_to_ipg_bucket",
            Edit(
                find="get_accelerator().default_stream()", put="get_accelerator().current_stream()"
            ),
        ),
    ),
)
