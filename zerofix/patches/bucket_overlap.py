"""ZeRO-1/2 with overlap_comm does not overlap."""

from __future__ import annotations

from zerofix.fix import Edit, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerofix.config import Training

_MODULE = "deepspeed.runtime.zero.stage_1_and_2"


def _hit_by(training: Training) -> bool | str:
    if training.stage not in (1, 2) or not training.overlap_comm:
        return False
    return "if the gradients are more than one bucket holds (reduce_bucket_size), on a GPU"


FIX = Fix(
    name="bucket_overlap",
    title="ZeRO-1/2 with overlap_comm reduces during backward",
    symptom=(
        "ZeRO-1/2 with overlap_comm on a GPU is as slow as without: backward stands still while a "
        "bucket is reduced. No number is wrong."
    ),
    cause=(
        "Since 0.17.5 backward waits for each reduction, because the swap of the two buffers gives "
        "the same one each time. With the buffers in turn it need not: it waits for the reduction "
        "before. The wait also hides what average_tensor and grad_lifetime repair, and this fix is "
        "applied only with them."
    ),
    upstream=("#7805",),
    introduced="0.17.5",
    fixed="0.18.5",
    hit_by=_hit_by,
    # That wait was also all that kept buffers and gradients from being used again too early.
    needs=("average_tensor", "grad_lifetime"),
    targets=(
        Target(
            f"{_MODULE}:IPGBucket.clear",
            Edit(find="self.elements = 0\nself.index = 0", put="self.elements = 0"),
        ),
        Target(
            f"{_MODULE}:DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads",
            Edit(
                find="""
if not get_accelerator().resolves_data_dependency():
    self.reduction_stream.wait_stream(get_accelerator().current_stream())
    get_accelerator().current_stream().wait_stream(self.reduction_stream)
""",
                put="pass",
            ),
        ),
    ),
)
