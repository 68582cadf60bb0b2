"""ZeRO-1/2 with overlap_comm fills the buffer that is being reduced."""

from zerofix.fix import Edit, Fix, Target

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
    targets=(
        Target(
            "deepspeed.runtime.zero.stage_1_and_2:IPGBucket.clear",
            Edit(find="self.elements = 0\nself.index = 0", put="self.elements = 0"),
        ),
    ),
)
