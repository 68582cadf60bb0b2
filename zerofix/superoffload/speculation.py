"""Which steps the worker begins during the backward, and which of them count."""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from zerofix.superoffload.client import Client
from zerofix.superoffload.memory import Memory
from zerofix.superoffload.mode import GIB, available, engines, needed
from zerofix.superoffload.worker import Setup, Task


class _Begun(NamedTuple):
    task: Task
    number: int
    """The client's."""


class Speculation:
    """The steps of one SuperOffload optimizer on its subgroups in CPU memory.

    As soon as all gradients of a subgroup are there, the worker computes its step into the
    second of two states. The step of the optimizer then only says that this state is the one in
    force, if plain offload would have computed just that; else the worker computes it again.
    """

    def __init__(self, optimizer: Any, cores: float) -> None:
        """Start a worker for a ``DeepSpeedZeroOptimizer_Stage3``, if it can have one.

        Without one the optimizer is plain offload.

        Args:
            cores: the part of the cores of this process that the worker gets.
        """
        from deepspeed.accelerator import get_accelerator
        from deepspeed.utils import logger

        self._optimizer = optimizer
        on_cpu = [i for i, device in optimizer.subgroup_to_device.items() if device == "cpu"]
        sizes = [optimizer.fp32_partitioned_groups_flat[i].numel() for i in on_cpu]
        self.obstacle = _obstacle(optimizer, on_cpu, sizes)
        """Why there is no worker; empty when there is."""
        self._places = {} if self.obstacle else {i: place for place, i in enumerate(on_cpu)}
        """Subgroup to its place in the shared memory, of those in CPU memory."""
        self._current = dict.fromkeys(self._places, 0)
        self._promising = True
        """Whether the last step was not clipped."""
        self._forget()
        self._pinned = False
        """Whether the gradients are in page-locked memory: only to it are copies asynchronous."""
        self.mode = f"as plain offload does: {self.obstacle}"
        engines.add(self)
        if self.obstacle:
            logger.warning(f"zerofix: SuperOffload steps {self.mode}")
            return
        self._memory = Memory(sizes)
        self._client = Client(self._memory, Setup(sizes, optimizer.optimizer.adam_w_mode), cores)
        for i in self._places:
            self._adopt(i)
        if optimizer.offload_optimizer_pin_memory and get_accelerator().device_name() == "cuda":
            gradients = self._memory.gradients
            try:
                _cuda("cudaHostRegister", gradients.data_ptr(), gradients.numel(), 0)
                self._pinned = True
            except RuntimeError as error:
                logger.warning(f"zerofix: gradients of SuperOffload are not page-locked: {error}")
        self.mode = (
            "during the backward, into "
            f"{needed(sizes) * 3 / 7 / GIB:.2f} GiB of host memory more than plain offload has"
        )
        logger.info(f"zerofix: SuperOffload steps {self.mode}")

    def __getattr__(self, name: str) -> NoReturn:
        # DeepSpeed's own methods look for their worker here.
        raise AttributeError(
            f"SuperOffload's worker has no {name}. An engine made with the fix superoffload or "
            "superoffload_step does not train without it: apply it again, or make a new engine."
        )

    # During the backward

    def arrived(self, parameters: Sequence[Any]) -> None:
        """The gradients of these parameters are on their way to the CPU."""
        from deepspeed.accelerator import get_accelerator

        optimizer = self._optimizer
        boundary = optimizer.is_gradient_accumulation_boundary
        # An attribute that has become a method in 0.19.
        if not self._places or not (boundary() if callable(boundary) else boundary):
            return
        complete = []
        for parameter in parameters:
            key = optimizer.get_param_id(parameter)
            i = optimizer.grad_position[key][0]
            if i not in self._places:
                continue
            if key in self._arrived[i]:
                self._changed.add(i)  # one more backward in this step
            self._arrived[i].add(key)
            if len(self._arrived[i]) == len(optimizer.fp16_groups[i]) and i not in self._changed:
                complete.append(i)
        if complete and self._promising:
            # The copies are asynchronous. Later in the backward the event tells of their end.
            event = None
            if not get_accelerator().is_synchronized_device():
                event = get_accelerator().Event()
                event.record()
            self._copying.append((event, complete))
        self.begin()

    def begin(self) -> None:
        """Give the worker the subgroups whose gradients are in CPU memory by now."""
        while self._copying and (self._copying[0][0] is None or self._copying[0][0].query()):
            for i in self._copying.pop(0)[1]:
                self._adopt(i)
                task = self._task(i)
                self._begun[i] = _Begun(task, self._client.submit(task))

    def change(self) -> None:
        """Weights, gradients or optimizer states are written to, and not by a step."""
        self._changed.update(self._places)

    # In the step

    def scale(self, original: Callable[..., None], i: int, norm: Any) -> None:
        """Unscale and clip the gradients of subgroup ``i``, in its turn, as ``original`` does.

        Args:
            norm: of all gradients, not unscaled.
        """
        if i not in self._places:
            original(self._optimizer, i, norm)
            return
        if not self._decided:
            self._decide(original, norm)
        if i in self._kept and self._optimizer.loss_scale != 1.0:
            # The worker has scaled what it read. Here it is for those who look at gradients.
            self._client.wait(self._begun[i].number)
            original(self._optimizer, i, norm)

    def take(self, i: int) -> bool:
        """Let the step on subgroup ``i`` count; False when it is not the worker's."""
        if i not in self._places:
            return False
        begun = self._begun[i]
        self._client.wait(begun.number)
        self._current[i] = 1 - self._current[i]
        new = self._memory.subgroups[self._places[i]].states[self._current[i]]
        weights = self._optimizer.fp32_partitioned_groups_flat[i]
        weights.data = new.weights
        self._optimizer.optimizer.state[weights].update(
            step=begun.task.step, exp_avg=new.exp_avg, exp_avg_sq=new.exp_avg_sq
        )
        return True

    def end_step(self) -> None:
        """Drop what a skipped step has not taken."""
        if self._begun and not self._decided:
            self._client.cancel()
        self._forget()

    def close(self) -> None:
        """End the worker. Weights and states stay readable."""
        engines.discard(self)
        if self._places:
            self._places = {}
            self._client.close()
            if self._pinned:
                _cuda("cudaHostUnregister", self._memory.gradients.data_ptr())

    def _forget(self) -> None:
        self._arrived: dict[int, set[int]] = defaultdict(set)
        """Subgroup to the parameters whose gradients came at this boundary."""
        self._changed: set[int] = set()
        """Subgroups whose step, if begun, was begun from something else than is there now."""
        self._copying: list[tuple[Any, list[int]]] = []
        """Events and the subgroups whose gradients are in CPU memory after them."""
        self._begun: dict[int, _Begun] = {}
        self._decided = False
        self._kept: set[int] = set()

    def _decide(self, original: Callable[..., None], norm: Any) -> None:
        """Keep the steps that are right, begin all others anew."""
        optimizer = self._optimizer
        self._decided = True
        excess = 0.0
        if optimizer.clip_grad > 0.0:
            # As unscale_and_clip_grads rounds it. What is above 1 divides the gradients.
            excess = ((norm / optimizer.loss_scale) + 1e-6) / optimizer.clip_grad
        self._promising = bool(excess <= 1.0)  # not so for NaN
        if self._begun and not self._promising:
            self._client.cancel()
        for i in self._places:
            moved = self._adopt(i)
            task = self._task(i)
            begun = self._begun.get(i)
            right = begun is not None and begun.task == task and not moved
            if self._promising and right and i not in self._changed:
                self._kept.add(i)
                continue
            if begun is not None:
                self._client.wait(begun.number)  # it reads the gradient
            original(optimizer, i, norm)
            task = task._replace(factor=1.0)
            self._begun[i] = _Begun(task, self._client.submit(task))

    def _task(self, i: int) -> Task:
        """The step that plain offload would do on subgroup ``i`` now, not clipped."""
        inner = self._optimizer.optimizer
        group = inner.param_groups[self._optimizer.sub_group_to_group_id[i]]
        hyperparameters = {name: group[name] for name in inner.defaults if name in group}
        state = inner.state[self._optimizer.fp32_partitioned_groups_flat[i]]
        return Task(
            subgroup=self._places[i],
            current=self._current[i],
            step=int(state["step"]) + 1,
            # A copy: a scheduler may change a tensor in place.
            hyperparameters=copy.deepcopy(hyperparameters),
            factor=1.0 / float(self._optimizer.loss_scale),
        )

    def _adopt(self, i: int) -> bool:
        """Move what subgroup ``i`` has elsewhere to the shared memory; whether anything was.

        It was at first, and is after a checkpoint is loaded.
        """
        weights = self._optimizer.fp32_partitioned_groups_flat[i]
        state = self._optimizer.optimizer.state[weights]
        gradient, states = self._memory.subgroups[self._places[i]]
        current = states[self._current[i]]
        if not state:
            zero = torch.zeros_like(weights.data)
            state.update(step=0, exp_avg=zero, exp_avg_sq=zero)
        moved = False
        if _is_elsewhere(weights, current.weights):
            moved = True
            weights.data = current.weights.copy_(weights.data)
        if _is_elsewhere(weights.grad, gradient):
            moved = True
            weights.grad = gradient.copy_(weights.grad)
        for name in ("exp_avg", "exp_avg_sq"):
            ours: Tensor = getattr(current, name)
            if _is_elsewhere(state[name], ours):
                moved = True
                state[name] = ours.copy_(state[name])
        return moved


def _is_elsewhere(tensor: Tensor, ours: Tensor) -> bool:
    return tensor.data_ptr() != ours.data_ptr()


def _obstacle(optimizer: Any, on_cpu: Sequence[int], sizes: Sequence[int]) -> str:
    """Why the worker cannot do what plain offload does; empty when it can."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    inner = optimizer.optimizer
    if not on_cpu:
        return "no subgroup is in CPU memory"
    if type(inner) is not DeepSpeedCPUAdam:
        return f"the optimizer is {type(inner).__name__}, not DeepSpeedCPUAdam"
    dtypes = {optimizer.fp32_partitioned_groups_flat[i].dtype for i in on_cpu}
    if not inner.fp32_optimizer_states or dtypes != {torch.float32}:
        return "master weights or optimizer states are not fp32"
    if optimizer.torch_autocast_gradscaler:
        return "torch's GradScaler decides on the steps"
    if optimizer.swap_optimizer:
        return "optimizer states are swapped to NVMe"
    if not hasattr(os, "memfd_create"):
        return "this system cannot share anonymous memory"
    # Every rank of this node needs as much, and asks at the same time. The names are torchrun's
    # and DeepSpeed's.
    ranks = [int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")]
    wanted = needed(sizes) * max(ranks)
    if wanted > available():
        return f"it needs {wanted / GIB:.1f} GiB of host memory, {available() / GIB:.1f} are free"
    return ""


def _cuda(function: str, *arguments: int) -> None:
    """Call the CUDA runtime; an error is raised."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(getattr(cudart, function)(*arguments))
