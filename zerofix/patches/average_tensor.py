"""ZeRO-1/2 reduces a gradient bucket before all streams have written it."""

from __future__ import annotations

from collections.abc import Callable

from zerofix.fix import Around, Edit, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zerofix.config import Training

_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


def _writing(original: Callable[..., Any]) -> Callable[..., Any]:
    from zerofix.kernels.provenance import wait_for_the_last_read

    return wait_for_the_last_read(original)


def _reducing(original: Callable[..., Any]) -> Callable[..., Any]:
    from zerofix.kernels.provenance import wait_for_all_writers

    return wait_for_all_writers(original)


def _hit_by(training: Training) -> bool | str:
    if training.stage not in (1, 2) or (training.offloads_optimizer and training.since("0.19.8")):
        return False
    return "if gradients come from several streams, as under torch.compile"


FIX = Fix(
    name="average_tensor",
    title="no reduction of ZeRO-1/2 reads a gradient bucket before it is written",
    symptom=(
        "ZeRO-1/2 on a GPU where gradient hooks run on several streams, as under torch.compile or "
        "in a model that uses streams itself: NaN from the first step, or gradients of another "
        "micro-batch in silence."
    ),
    cause=(
        "The reduction waits for the stream it is started from, and gradients that other streams "
        "copy into the bucket may still be on their way; nor do other streams wait for a "
        "reduction before they write its buffer again. Before 0.19.3 with overlap_comm, and "
        "without it, for gradients larger than the bucket, and for the buffer's reuse in every "
        "release, except with optimizer offload in 0.19.8."
    ),
    upstream=("#8080", "#8061"),
    introduced=None,
    fixed=None,
    hit_by=_hit_by,
    targets=(
        Target(
            f"{_OPTIMIZER}.reduce_independent_p_g_buckets_and_remove_grads",
            Around(
                _writing,
                Edit(
                    find="new_grad_tensor.copy_",
                    put="self.bucket_provenance.copy_into(new_grad_tensor, grad_reduc)",
                ),
            ),
        ),
        Target(f"{_OPTIMIZER}.reduce_ipg_grads", Around(_reducing)),
    ),
)
