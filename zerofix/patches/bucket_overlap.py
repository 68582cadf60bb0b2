"""ZeRO-1/2 with overlap_comm does not overlap."""

from __future__ import annotations

from zerofix.fix import Edit, Fix, Target
from zerofix.patches import bucket_index

_MODULE = "deepspeed.runtime.zero.stage_1_and_2"


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
    hit_by=bucket_index.hit_by,
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
