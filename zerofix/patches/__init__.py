"""The catalogue of fixes, in the order in which they are listed and applied."""

from zerofix.fix import Fix
from zerofix.patches import (
    copy_grads,
    cpu_adam,
    cpu_adam_resume,
    grad_accumulation,
    superoffload,
    superoffload_step,
)

CATALOGUE: tuple[Fix, ...] = (
    copy_grads.FIX,
    grad_accumulation.FIX,
    cpu_adam.FIX,
    cpu_adam_resume.FIX,
    superoffload.FIX,
    superoffload_step.FIX,
)
