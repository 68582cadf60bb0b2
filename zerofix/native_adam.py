"""A binding of the native CPUAdam in which a call knows nothing of the calls before it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def bind_anew(init: Callable[..., None]) -> Callable[..., None]:
    """Let ``DeepSpeedCPUAdam.__init__`` end with such a binding in ``ds_opt_adam``."""

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # Not one that is there already: two fixes ask for it.
        if type(getattr(self, "ds_opt_adam", None)) is ModuleType:
            self.ds_opt_adam = Binding(self.ds_opt_adam)

    return __init__


class Binding(ModuleType):
    """The native module, with another ``adam_update``."""

    def __init__(self, native: ModuleType) -> None:
        super().__init__(native.__name__)
        vars(self).update(vars(native), adam_update=_without_memory(native))


def _without_memory(native: ModuleType) -> Callable[..., Any]:
    """``native.adam_update``, made to compute the powers of the betas from the step.

    The native optimizer keeps the powers of its last call, and multiplies them by the betas
    where it takes a call for the next step. That product is not the power, to the last bit, and
    when it is taken differs between releases. All of them compute the powers when the betas
    change, so a step on nothing with betas that nobody has goes before.
    """
    import torch

    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    forget = (0, 0.0, -1.0, -1.0, 0.0, 0.0, False, nothing, nothing, nothing, nothing)
    last = None

    @functools.wraps(native.adam_update)
    def adam_update(
        optimizer_id: int, step: int, lr: float, beta1: float, beta2: float, *rest: Any
    ) -> Any:
        nonlocal last
        # As numbers: a tensor that counts in place would equal itself of a step ago.
        now = (optimizer_id, int(step), float(beta1), float(beta2))
        # Every release computes or keeps them when the same is asked again.
        if now != last:
            native.adam_update(optimizer_id, *forget)
            last = now
        return native.adam_update(optimizer_id, step, lr, beta1, beta2, *rest)

    return adam_update
