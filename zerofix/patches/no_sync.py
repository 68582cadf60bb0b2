"""no_sync with ZeRO-1 and overlap_comm ends in an assertion."""

from __future__ import annotations

import functools
from collections.abc import Callable

from zerofix.fix import Around, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from zerofix.config import Training


def _not_inside(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def is_gradient_accumulation_boundary(self: Any) -> Any:
        return not self.inside_no_sync_ctxt and original(self)

    return is_gradient_accumulation_boundary


def _hit_by(training: Training) -> bool | str:
    return training.stage == 1 and training.overlap_comm and "if engine.no_sync() is used"


FIX = Fix(
    name="no_sync",
    title="ZeRO-1 with overlap_comm reduces nothing under no_sync",
    symptom=(
        "engine.no_sync() with ZeRO-1 and overlap_comm: the backward after it ends in 'The "
        "parameter has already been reduced'."
    ),
    cause=(
        "The hooks reduce at the accumulation boundary, which without gradient accumulation is "
        "every backward, and do not ask for no_sync."
    ),
    upstream=(),
    introduced=None,
    fixed=None,
    hit_by=_hit_by,
    targets=(
        Target(
            "deepspeed.runtime.engine:DeepSpeedEngine.is_gradient_accumulation_boundary",
            Around(_not_inside),
        ),
    ),
)
