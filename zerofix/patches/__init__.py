"""The catalogue: one module a fix, in the order in which they are applied and reported."""

from zerofix.fix import Fix
from zerofix.patches import (
    autocast_scaler,
    average_tensor,
    bucket_index,
    bucket_overlap,
    copy_grads,
    cpu_adam,
    cpu_adam_resume,
    grad_accumulation,
    grad_lifetime,
    superoffload,
    superoffload_step,
    zero3_reduce_stream,
)

CATALOGUE: tuple[Fix, ...] = (
    copy_grads.FIX,
    grad_accumulation.FIX,
    cpu_adam.FIX,
    cpu_adam_resume.FIX,
    average_tensor.FIX,
    grad_lifetime.FIX,
    bucket_index.FIX,
    bucket_overlap.FIX,
    zero3_reduce_stream.FIX,
    superoffload.FIX,
    superoffload_step.FIX,
    autocast_scaler.FIX,
)
