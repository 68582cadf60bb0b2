"""ZeRO-1/2 frees tensors of a reduction that the reduction's stream still uses."""

from __future__ import annotations

import functools
from collections.abc import Callable

from zerofix.fix import Around, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _flattening(original: Callable[..., Any]) -> Callable[..., Any]:
    from deepspeed.accelerator import get_accelerator

    @functools.wraps(original)
    def allreduce_bucket(self: Any, bucket: Any, *args: Any, **kwargs: Any) -> Any:
        if not get_accelerator().resolves_data_dependency():
            for tensor in bucket:
                tensor.record_stream(get_accelerator().current_stream())
        return original(self, bucket, *args, **kwargs)

    return allreduce_bucket


FIX = Fix(
    name="reduction_lifetime",
    title="ZeRO-1/2 keeps what a reduction reads and writes until it has run",
    symptom=(
        "ZeRO-1/2 on a GPU, most of all with contiguous_gradients off: the memory of a gradient is "
        "given away while it is reduced, and the training is wrong in silence."
    ),
    cause=(
        "The allocator is not told that the reduction's stream reads the gradients and copies the "
        "sum back to them."
    ),
    upstream=("#7965",),
    introduced=None,
    fixed="0.19.0",
    targets=(
        Target(
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.allreduce_bucket",
            Around(_flattening),
        ),
    ),
)
