"""ZeRO-1/2 with overlap_comm fills the buffer that is being reduced."""

from __future__ import annotations

from zerofix.fix import Edit, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerofix.config import Training


def hit_by(training: Training) -> bool | str:
    if training.stage not in (1, 2) or not training.overlap_comm:
        return False
    return "if the gradients are more than one bucket holds (reduce_bucket_size), on a GPU"


FIX = Fix(
    name="bucket_index",
    title="ZeRO-1/2 with overlap_comm takes its two buffers in turn",
    symptom=(
        "ZeRO-1/2 with overlap_comm on a GPU, and more gradients than one bucket holds: gradients "
        "are overwritten while they are reduced, and the training is wrong in silence."
    ),
    cause=(
        "Emptying a bucket sets the index of its buffer back to 0, so that the swap that follows "
        "gives the same buffer each time."
    ),
    upstream=("#7371", "#7805"),
    introduced="0.17.2",
    fixed="0.17.5",
    hit_by=hit_by,
    targets=(
        Target(
            "deepspeed.runtime.zero.stage_1_and_2:IPGBucket.clear",
            Edit(find="self.elements = 0\nself.index = 0", put="self.elements = 0"),
        ),
    ),
)
