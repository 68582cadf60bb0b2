"""What the reproductions of CPUAdam share: equal parameters, their optimizer, a step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_SIZE = 1024


def optimizer_of(count: int) -> tuple[Any, list[torch.nn.Parameter]]:
    """DeepSpeedCPUAdam and its parameters, which are equal."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        CPUAdamBuilder().load()
    except Exception as error:
        sys.exit(f"DeepSpeed cannot compile CPUAdam here; it needs g++ and ninja: {error}")
    start = torch.randn(_SIZE, generator=torch.Generator().manual_seed(0))
    parameters = [torch.nn.Parameter(start.clone()) for _ in range(count)]
    return DeepSpeedCPUAdam(parameters, lr=1e-3), parameters


def step(optimizer: Any, parameters: Sequence[torch.nn.Parameter], index: int) -> None:
    """One step, with the same gradient for all parameters."""
    gradient = torch.randn(_SIZE, generator=torch.Generator().manual_seed(index + 1))
    for parameter in parameters:
        parameter.grad = gradient.clone()
    optimizer.step()


def apart(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference."""
    return (one.detach() - other.detach()).abs().max().item()
