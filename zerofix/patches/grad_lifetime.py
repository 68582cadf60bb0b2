"""ZeRO-1/2 frees gradients that another stream still reads."""

from __future__ import annotations

import functools
from collections.abc import Callable

from zerofix.fix import Around, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zerofix.config import Training

_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


def _copying(original: Callable[..., Any]) -> Callable[..., Any]:
    from deepspeed.accelerator import get_accelerator

    from zerofix.kernels.provenance import streams_matter

    @functools.wraps(original)
    def reduce_independent_p_g_buckets_and_remove_grads(self: Any, param: Any, i: int) -> Any:
        if streams_matter(self):
            current = get_accelerator().current_stream()
            if param.grad is not None:
                param.grad.record_stream(current)
            # Accumulated in a data type of its own, it is read again when it is reduced.
            if getattr(param, "grad_accum", None) is not None:
                param.grad_accum.record_stream(current)
                if self.overlap_comm:
                    param.grad_accum.record_stream(self.reduction_stream)
        return original(self, param, i)

    return reduce_independent_p_g_buckets_and_remove_grads


def _averaging(original: Callable[..., Any]) -> Callable[..., Any]:
    from deepspeed.accelerator import get_accelerator

    from zerofix.kernels.provenance import streams_matter

    @functools.wraps(original)
    def average_tensor(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if streams_matter(self):
            current = get_accelerator().current_stream()
            tensor.record_stream(self.reduction_stream if self.overlap_comm else current)
        return original(self, tensor, *args, **kwargs)

    return average_tensor


def _flattening(original: Callable[..., Any]) -> Callable[..., Any]:
    from deepspeed.accelerator import get_accelerator

    from zerofix.kernels.provenance import streams_matter

    @functools.wraps(original)
    def allreduce_bucket(self: Any, bucket: Any, *args: Any, **kwargs: Any) -> Any:
        if streams_matter(self):
            # They are read here, and the sum is copied back to them.
            for tensor in bucket:
                tensor.record_stream(get_accelerator().current_stream())
        return original(self, bucket, *args, **kwargs)

    return allreduce_bucket


def _handing_over(original: Callable[..., Any]) -> Callable[..., Any]:
    from deepspeed.accelerator import get_accelerator

    from zerofix.kernels.provenance import streams_matter

    @functools.wraps(original)
    def independent_gradient_partition_epilogue(self: Any) -> Any:
        result = original(self)
        if streams_matter(self):
            # The step reads them on this stream, then frees them.
            for gradients in self.averaged_gradients.values():
                for tensor in gradients or ():
                    if get_accelerator().on_accelerator(tensor):
                        tensor.record_stream(get_accelerator().current_stream())
        return result

    return independent_gradient_partition_epilogue


def _hit_by(training: Training) -> bool | str:
    if training.stage not in (1, 2) or (training.offloads_optimizer and training.since("0.19.8")):
        return False
    streams = "if gradients come from several streams, as under torch.compile"
    if training.overlap_comm and not training.since("0.19.0"):
        return f"{streams}, or a parameter is larger than reduce_bucket_size, on a GPU"
    return streams


FIX = Fix(
    name="grad_lifetime",
    title="ZeRO-1/2 keeps the memory of a gradient until all streams have read it",
    symptom=(
        "ZeRO-1/2 on a GPU, with overlap_comm and a parameter larger than reduce_bucket_size, or "
        "with gradients of several streams: the memory of a gradient is given away while it is "
        "reduced, and the training is wrong in silence."
    ),
    cause=(
        "The allocator hands freed memory to its own stream at once, and is not told of the stream "
        "that reads the gradient. With overlap_comm most of it is closed in 0.19.0 (#7965), with "
        "optimizer offload all of it in 0.19.8."
    ),
    upstream=("#7965",),
    introduced=None,
    fixed=None,
    hit_by=_hit_by,
    targets=(
        Target(f"{_OPTIMIZER}.reduce_independent_p_g_buckets_and_remove_grads", Around(_copying)),
        Target(f"{_OPTIMIZER}.average_tensor", Around(_averaging)),
        Target(f"{_OPTIMIZER}.allreduce_bucket", Around(_flattening)),
        Target(f"{_OPTIMIZER}.independent_gradient_partition_epilogue", Around(_handing_over)),
    ),
)
