"""CPUAdam goes on from a checkpoint with other bits than without it."""

from __future__ import annotations

from zerofix.fix import Around, Fix, Target
from zerofix.native_adam import bind_anew

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerofix.config import Training


def _hit_by(training: Training) -> bool | str:
    resumed = "it is resumed from a checkpoint, or has parameter groups of different betas"
    if training.cpu_adam is True:
        return f"if {resumed}"
    return training.cpu_adam and f"{training.cpu_adam}, and {resumed}"


FIX = Fix(
    name="cpu_adam_resume",
    title="CPUAdam resumes bit for bit",
    symptom=(
        "With offload_optimizer and DeepSpeedCPUAdam, training that is saved, loaded and "
        "continued differs in the last bits from training that was never interrupted, and so do "
        "two parameter groups of different betas from two optimizers. This fix changes the last "
        "bits of the bias correction, hence of every weight, also of a run without a checkpoint."
    ),
    cause=(
        "The native optimizer computes the powers of the betas after a jump of the step or a "
        "change of the betas, and otherwise multiplies those of its last call by the betas. No "
        "checkpoint holds that product. Here they are computed from the step at every step; "
        "before 0.19.0 the fix cpu_adam does the same."
    ),
    upstream=(),
    introduced=None,
    fixed=None,
    hit_by=_hit_by,
    targets=(Target("deepspeed.ops.adam.cpu_adam:DeepSpeedCPUAdam.__init__", Around(bind_anew)),),
    limits=(
        "ZenFlow with overlap_step from 0.19.3 on steps in a native worker that does not go "
        "through DeepSpeedCPUAdam, and code that calls CPUAdamBuilder().load() itself has "
        "DeepSpeed's binding. To have stock's numbers before 0.19.0, turn off cpu_adam as well."
    ),
)
