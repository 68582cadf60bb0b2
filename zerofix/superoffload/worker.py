"""The process that computes the steps of the subgroups whose optimizer is on the CPU."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from zerofix.native_adam import Binding
from zerofix.superoffload.memory import Memory


class Task(NamedTuple):
    """One step on one subgroup, from one of its two states to the other."""

    subgroup: int
    """Its place in ``Memory.subgroups``."""
    current: int
    """Which state is in force."""
    step: int
    """The number of the step, from 1 on."""
    hyperparameters: Mapping[str, Any]
    """Those of its parameter group, as they are at this step."""
    factor: float
    """What the gradient is multiplied by."""


class Setup(NamedTuple):
    """What the worker is told before its first task."""

    sizes: Sequence[int]
    """Elements of each subgroup."""
    adamw_mode: bool


def serve(connection_file: int, memory_file: int) -> None:
    """Do what comes over the connection, task after task, until its other end is closed.

    The answer to a task is None. An exception ends the worker; its traceback is the last answer.
    """
    # Ctrl-C goes to all processes of a terminal. The training process says when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(connection_file)
    try:
        setup: Setup = connection.recv()
        memory = Memory(setup.sizes, memory_file)
        memory.close_file()
        worker = _Worker(memory, adamw_mode=setup.adamw_mode)
        while True:
            worker.do(*connection.recv())
            connection.send(None)
    except (EOFError, ConnectionError):
        return
    except BaseException:
        connection.send(traceback.format_exc())
        raise


class _Worker:
    def __init__(self, memory: Memory, *, adamw_mode: bool) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self._memory = memory
        nothing = torch.nn.Parameter(torch.empty(0))
        self._optimizer = DeepSpeedCPUAdam([nothing], adamw_mode=adamw_mode)
        # Steps come in the order of the backward, and some twice: a call must not depend on those
        # before.
        self._optimizer.ds_opt_adam = Binding(self._optimizer.ds_opt_adam)
        largest = max(buffers.gradient.numel() for buffers in memory.subgroups)
        self._scaled = torch.empty(largest)

    def do(self, number: int, task: Task) -> None:
        if number <= self._memory.cancelled:
            return
        buffers = self._memory.subgroups[task.subgroup]
        current, new = buffers.states[task.current], buffers.states[1 - task.current]
        for source, target in zip(current, new, strict=True):
            target.copy_(source)
        gradient = buffers.gradient
        if task.factor != 1.0:
            gradient = torch.mul(gradient, task.factor, out=self._scaled[: gradient.numel()])
        parameter = torch.nn.Parameter(new.weights)
        parameter.grad = gradient
        # The road that plain offload takes, with a state for this one step.
        (group,) = self._optimizer.param_groups
        group.update(task.hyperparameters, params=[parameter])
        self._optimizer.state.clear()
        self._optimizer.state[parameter] = {
            "step": task.step - 1,
            "exp_avg": new.exp_avg,
            "exp_avg_sq": new.exp_avg_sq,
        }
        self._optimizer.step()
