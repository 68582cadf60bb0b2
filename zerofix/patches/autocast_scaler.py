"""ZeRO with torch_autocast in float16 skips every step for ever."""

from __future__ import annotations

from zerofix.fix import Edit, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.amp import GradScaler

    from zerofix.config import Training


def back_off(scaler: GradScaler) -> None:
    """Lower the scale as for an overflow, by a step that has one."""
    import torch

    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.full_like(parameter, float("inf"))
    scaler.step(torch.optim.SGD([parameter]))
    scaler.update()


_EDIT = Edit(
    find="prev_scale = self.loss_scale",
    put="""
prev_scale = self.loss_scale
if self.overflow and self.torch_autocast_gradscaler is not None:
    from zerofix.patches.autocast_scaler import back_off
    back_off(self.torch_autocast_gradscaler)
""",
)


def _hit_by(training: Training) -> bool:
    return (
        training.stage > 0
        and training.get("torch_autocast.enabled", False)
        and training.get("torch_autocast.dtype", "bfloat16")
        in ("float16", "fp16", "half", "torch.float16")
    )


FIX = Fix(
    name="autocast_scaler",
    title="ZeRO with torch_autocast in float16 lowers its scale after an overflow",
    symptom=(
        "ZeRO with torch_autocast in float16: after the first overflow, often the first step, "
        "every step is skipped and no weight changes."
    ),
    cause=(
        "The scale is lowered by the optimizer's step alone, and since 0.19.8 a norm that is not "
        "finite ends the step before it."
    ),
    upstream=(),
    introduced="0.19.8",
    fixed=None,
    hit_by=_hit_by,
    targets=(
        Target("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.step", _EDIT),
        Target(
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
            "._loss_scale_update_and_overflow_cleanup",
            _EDIT,
        ),
    ),
)
