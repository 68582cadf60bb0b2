"""CPUAdam gives the subgroups of one step different bits."""

from __future__ import annotations

from zerofix.fix import Around, Fix, Target
from zerofix.native_adam import bind_anew

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerofix.config import Training


def _hit_by(training: Training) -> bool | str:
    return training.cpu_adam


FIX = Fix(
    name="cpu_adam",
    title="CPUAdam gives every subgroup of a step the same bits",
    symptom=(
        "With offload_optimizer and DeepSpeedCPUAdam, parameters that should stay equal drift "
        "apart from step 3 on: how a model is split into parameters, groups or subgroups, and in "
        "which order they are updated, changes the result. This fix changes the last bits of the "
        "bias correction, hence of every weight."
    ),
    cause=(
        "The native optimizer serves all subgroups and keeps the powers of the betas of its last "
        "call. The first subgroup of a step multiplies them by the betas, the others compute "
        "them from the step, and the two differ in the last bits."
    ),
    upstream=("#7982", "#7859", "#7819"),
    introduced=None,
    fixed="0.19.0",
    hit_by=_hit_by,
    targets=(Target("deepspeed.ops.adam.cpu_adam:DeepSpeedCPUAdam.__init__", Around(bind_anew)),),
    limits=(
        "A split that moves elements between the full vectors (of 16 numbers on AVX-512) and the "
        "rest of a subgroup still changes last bits: the native code rounds the two differently. "
        "The source of this function is the same from 0.16.0 to 0.19.7, and so the version number "
        "decides. cpu_adam_resume does the same: to have stock's numbers, turn off both."
    ),
)
