"""ZeRO-3 frees gradients that are still being reduced."""

from __future__ import annotations

import functools
from collections.abc import Callable

from zerofix.fix import Around, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _adding(original: Callable[..., Any]) -> Callable[..., Any]:
    from deepspeed.accelerator import get_accelerator

    @functools.wraps(original)
    def __add_grad_to_ipg_bucket(self: Any, param: Any) -> None:
        original(self, param)
        if not get_accelerator().resolves_data_dependency():
            param.grad.record_stream(self.reduce_and_partition_stream)

    return __add_grad_to_ipg_bucket


FIX = Fix(
    name="zero3_grad_lifetime",
    title="ZeRO-3 keeps the memory of a gradient until it is reduced",
    symptom=(
        "ZeRO-3 on a GPU with a parameter larger than reduce_bucket_size, or with "
        "contiguous_gradients off: the memory of a gradient is given away while it is reduced, and "
        "the training is wrong in silence."
    ),
    cause=(
        "The allocator hands freed memory to its own stream at once, and is told of the stream that "
        "reduces only for gradients that are copied into the bucket."
    ),
    upstream=(),
    introduced=None,
    fixed=None,
    targets=(
        Target(
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.__add_grad_to_ipg_bucket",
            Around(_adding),
        ),
    ),
)
