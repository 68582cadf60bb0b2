"""SuperOffload's steps know too little, and those of a skipped step cannot be taken back."""

from __future__ import annotations

from zerofix.fix import Edit, Fix, Target
from zerofix.superoffload.methods import SUPEROFFLOAD, TARGETS
from zerofix.superoffload.mode import hit_by, modes

FIX = Fix(
    name="superoffload_step",
    title="SuperOffload's steps are those of plain offload, also during the backward",
    symptom=(
        "With super_offload, bias_correction and adamw_mode=False are ignored, and so is what a "
        "scheduler does to betas, eps and weight decay; one parameter without gradient freezes "
        "its subgroup; after an overflow all weights are 0 and all moments NaN; fp16 steps with "
        "scaled gradients; checkpoints have no optimizer state. With gradient_clipping, a "
        "default from 0.19.3 on, nothing overlaps with the backward."
    ),
    cause=(
        "The worker keeps the hyper-parameters of the start and the optimizer states to itself, "
        "steps in place before it is known whether there is a step, and computes backwards to "
        "undo it. Before 0.18.9 the fix superoffload repairs this as well."
    ),
    upstream=(),
    introduced="0.18.9",
    fixed=None,
    hit_by=hit_by,
    targets=(
        Target(
            f"{SUPEROFFLOAD}.__init__",
            Edit(
                find='cpuadam_cores_perc = kwargs.get("cpuadam_cores_perc", 0.8)',
                # What follows starts DeepSpeed's worker.
                put="""
from zerofix.superoffload.speculation import Speculation
cpuadam_cores_perc = kwargs.get("cpuadam_cores_perc", 0.8)
self.superoffload_cpu_optimizer = Speculation(self, cpuadam_cores_perc)
return
""",
            ),
        ),
        *TARGETS,
    ),
    limits=(
        "It takes 12 bytes of host memory a parameter of the rank's CPU subgroups more than plain "
        "offload. Where that is not there, or the optimizer is not DeepSpeedCPUAdam in fp32, "
        "SuperOffload steps as plain offload does; DeepSpeed's log and zerofix.status() say so. "
        "An engine made with the fix does not train without it."
    ),
    modes=modes,
)
