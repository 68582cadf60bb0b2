"""Steps DeepSpeedCPUAdam and tells how far apart things are that should have the same bits.

One process answers many questions, because importing DeepSpeed takes longer than most of them.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import processes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

STEPS = 300
SIZE = 1000
"""Elements of a parameter: full vectors and a rest."""
HALF_SIZE = 20_007
"""The same in 16 bits, which seldom show that a step was off by one bit of 32."""
POINTS = range(1, 121)
"""Steps after which a training is saved, and loaded in another process."""
LAST = 140


Question = tuple[Any, ...]
"""A function of this module and its arguments."""


def answer(question: Question, questions: Sequence[Question], *, stock: bool) -> Any:
    """The answer to one of some questions, which are asked together and once."""
    batch = json.dumps(questions)
    return _answers(batch, stock)[questions.index(question)]


@functools.cache
def _answers(batch: str, stock: bool) -> list[Any]:
    try:
        return ask(json.loads(batch), stock=stock)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        # Once is enough: every test would wait for the same end.
        return [str(error)] * len(json.loads(batch))


def ask(questions: Sequence[Question], *, stock: bool) -> list[Any]:
    """Call functions of this module, named with their arguments, in one worker process."""
    answers: list[Any] = processes.ask(worker, questions, 1, patched=not stock, timeout=600)
    return answers


def worker(folder: Path) -> None:
    import zerofix  # noqa: F401, I001
    import cpuinfo

    # Every optimizer asks for it, a second each time.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    import deepspeed  # noqa: F401
    import torch

    torch.set_num_threads(1)
    questions = json.loads((folder / "request.json").read_text())
    answers = [globals()[name](*arguments) for name, *arguments in questions]
    (folder / "answer.json").write_text(json.dumps(answers))


# One optimizer


def subgroups(road: str, dtype: str, states: str, options: dict[str, Any]) -> float:
    """Largest difference of three equal parameters after 300 steps, updated in random order.

    Args:
        road: ``step``, ``step_subgroup``, or ``both`` (one parameter by the other road).
        states: ``fp32``, or ``same`` (as the parameters).
    """
    optimizer, parameters = equals(3, dtype, fp32_optimizer_states=states == "fp32", **options)
    roads = ["step", "step_subgroup", "step"] if road == "both" else [road] * 3
    drawn = random.Random(0)
    for gradient in gradients(STEPS, parameters[0].numel()):
        for index in drawn.sample(range(3), 3):
            update(optimizer, parameters, index, gradient, roads[index])
    return apart(parameters)


def whole_steps() -> float:
    """Largest difference of three equal parameters after 300 calls of ``step`` with them all."""
    optimizer, parameters = equals(3)
    for gradient in gradients(STEPS):
        for parameter in parameters:
            parameter.grad = gradient.clone()
        optimizer.step()
    return apart(parameters)


def jumps(road: str, betas: bool) -> float:
    """Largest difference of two equal parameters through jumps of the step count.

    Both do the same, in random order: from step 2 to step 5, then now and then on or back by up
    to 4 steps, or to other betas.
    """
    optimizer, parameters = equals(2)
    asked = []
    native = optimizer.ds_opt_adam.adam_update

    def adam_update(*arguments: Any) -> Any:
        asked.append(arguments[1])
        return native(*arguments)

    optimizer.ds_opt_adam = SimpleNamespace(**vars(optimizer.ds_opt_adam))
    optimizer.ds_opt_adam.adam_update = adam_update
    drawn = random.Random(1)
    (group,) = optimizer.param_groups
    for index, gradient in enumerate(gradients(STEPS)):
        act = "jump" if index == 2 else drawn.choice(["jump", "betas", "rollback"] + ["step"] * 6)
        distance = 2 if index == 2 else drawn.randrange(1, 5)
        if act == "betas" and betas:
            group["betas"] = (drawn.choice([0.8, 0.9]), drawn.choice([0.99, 0.999]))
        for i in drawn.sample(range(2), 2):
            state = optimizer.state[key(parameters, i, road)]
            if act == "jump" and state:
                state["step"] += distance
            elif act == "rollback" and state and state["step"] > distance + 1:
                if road == "step_subgroup":
                    group["params"] = [parameters[i]]
                    parameters[i].grad = gradient.clone()
                    optimizer.rollback_subgroup(i)
                state["step"] -= distance
                continue
            update(optimizer, parameters, i, gradient, road)
        group["params"] = parameters
    if not any(later < earlier for earlier, later in itertools.pairwise(asked)):
        raise RuntimeError("no step went backwards")
    return apart(parameters)


def two_groups(steps: int) -> float:
    """Largest difference of two groups with betas of their own to two optimizers."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    many = [(0.9, 0.999), (0.8, 0.99)]
    torch.manual_seed(0)
    start = torch.randn(SIZE)
    together, apart_ = [[torch.nn.Parameter(start.clone()) for _ in many] for _ in range(2)]
    one = DeepSpeedCPUAdam(
        [{"params": [p], "betas": b} for p, b in zip(together, many, strict=True)], lr=1e-3
    )
    two = [DeepSpeedCPUAdam([p], lr=1e-3, betas=b) for p, b in zip(apart_, many, strict=True)]
    for gradient in gradients(steps):
        for parameter in together + apart_:
            parameter.grad = gradient.clone()
        for optimizer in [one, *two]:
            optimizer.step()
    return max(apart(pair) for pair in zip(together, apart_, strict=True))


def distance(options: dict[str, Any]) -> float:
    """Root mean square distance to ``torch.optim`` in fp64 over 5,000 steps of three subgroups."""
    size = 4000
    optimizer, parameters = equals(3, size=size, betas=BETAS, **options)
    exact, expected = torch_in_fp64(parameters[0], options)
    squares = 0.0
    for gradient in gradients(5000, size):
        for index in range(3):
            update(optimizer, parameters, index, gradient, "step")
        exact.grad = gradient.double()
        expected.step()
        for parameter in parameters:
            squares += (parameter.detach().double() - exact.detach()).square().mean().item()
    return float((squares / 5000 / 3) ** 0.5)


def distance_of_steps() -> float:
    """The same, of each step by itself: all start at zero, with the same moments.

    What is left is the bias correction, and the roundings of one step.
    """
    import torch

    optimizer, parameters = equals(3, betas=BETAS)
    exact, expected = torch_in_fp64(parameters[0], {})
    generator = torch.Generator().manual_seed(2)
    squares = 0.0
    for step, gradient in enumerate(gradients(5000), 1):
        moments = 0.5 + torch.rand(2, SIZE, generator=generator)
        exact.data.zero_()
        exact.grad = gradient.double()
        if step > 1:
            fill(expected.state[exact], moments)
        expected.step()
        for index, parameter in enumerate(parameters):
            parameter.data.zero_()
            if step > 1:
                fill(optimizer.state[parameter], moments)
            update(optimizer, parameters, index, gradient, "step")
            relative = parameter.detach().double() / exact.detach() - 1
            squares += relative.square().mean().item()
    return float((squares / 5000 / 3) ** 0.5)


BETAS = (0.8999999761581421, 0.9990000128746033)
"""The defaults as numbers of 32 bits: the native code has no others."""


def torch_in_fp64(start: Tensor, options: dict[str, Any]) -> tuple[Parameter, Any]:
    import torch

    parameter = torch.nn.Parameter(start.detach().double())
    kind = torch.optim.AdamW if options.get("adamw_mode", True) else torch.optim.Adam
    decay = options.get("weight_decay", 0.0)
    return parameter, kind([parameter], lr=1e-3, betas=BETAS, weight_decay=decay)


def fill(state: dict[str, Tensor], moments: Tensor) -> None:
    state["exp_avg"].copy_(moments[0])
    state["exp_avg_sq"].copy_(moments[1])


def counted_in_place() -> float:
    """Largest difference between step counts that are numbers and one that is a tensor."""
    import torch

    (optimizer, parameters), (other, (counted,)) = equals(2), equals(1)
    for step, gradient in enumerate(gradients(STEPS)):
        for parameter in [*parameters, counted]:
            parameter.grad = gradient.clone()
        optimizer.step()
        other.step()
        if step == 0:
            other.state[counted]["step"] = torch.tensor(1)
    if not torch.is_tensor(other.state[counted]["step"]):
        raise RuntimeError("the step count is a number again")
    return apart([*parameters, counted])


# The binding


def binding() -> dict[str, Any]:
    """How the optimizer's binding differs from the one that DeepSpeed loads."""
    import copy
    import pickle
    from types import ModuleType

    optimizer, _ = equals(1)
    native, bound = load(), optimizer.ds_opt_adam

    def error_of(act: Any, value: Any) -> str | None:
        try:
            act(value)
        except Exception as error:
            return f"{type(error).__name__} {error}".replace("Binding", "module")
        return None

    return {
        "bound": bound is not native,
        "names": dir(bound) == dir(native),
        "differ": [name for name in dir(native) if vars(bound)[name] is not vars(native)[name]],
        "is_module": isinstance(bound, ModuleType),
        "errors": [[error_of(f, m) for m in (native, bound)] for f in (pickle.dumps, copy.copy)],
        "optimizer": sorted(vars(pickle.loads(pickle.dumps(optimizer)))),
    }


def prebuilt() -> list[Any]:
    """How an operation that is installed with DeepSpeed is called, and how subgroups drift."""
    import torch
    from deepspeed import git_version_info
    from deepspeed.ops.op_builder import CPUAdamBuilder

    from zerofix.ops import origin

    sys.modules["deepspeed.ops.adam.cpu_adam_op"] = load()
    git_version_info.installed_ops["cpu_adam"] = True
    git_version_info.accelerator_name = "cpu"
    git_version_info.torch_info["version"] = ".".join(torch.__version__.split(".")[:2])
    CPUAdamBuilder._loaded_ops.clear()
    CPUAdamBuilder.jit_load = None
    return [origin("cpu_adam"), whole_steps()]


def layers(fixes: list[str]) -> int:
    """How many bindings lie around the native one with these fixes alone."""
    import zerofix

    zerofix.revert()
    for fix in fixes:
        zerofix.apply(fix)
    optimizer, _ = equals(1)
    update, native, count = optimizer.ds_opt_adam.adam_update, load().adam_update, 0
    while update is not native:
        cells = [cell.cell_contents for cell in update.__closure__]
        update = next(c.adam_update for c in cells if hasattr(c, "adam_update"))
        count += 1
    return count


def load() -> Any:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    return CPUAdamBuilder().load()


# Save and resume


def save(folder: str, count: int, road: str) -> None:
    """Train `count` parameters, and save after each of ``POINTS`` and at the end."""
    import torch

    optimizer, parameters = equals(count)
    for step, gradient in enumerate(gradients(LAST), 1):
        for index in range(count):
            update(optimizer, parameters, index, gradient, road)
        if step in POINTS or step == LAST:
            states = [optimizer.state[key(parameters, i, road)] for i in range(count)]
            saved = {"parameters": parameters, "states": states}
            torch.save(saved, f"{folder}/{count}-{road}-{step}.pt")


def resume(folder: str, count: int, road: str) -> dict[int, float]:
    """For each point of ``POINTS``: load, train to the end; the difference to no interruption."""
    import torch

    def read(step: int) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(
            f"{folder}/{count}-{road}-{step}.pt", weights_only=False
        )
        return loaded

    end = read(LAST)["parameters"]
    differences = {}
    for point in POINTS:
        optimizer, parameters = equals(count)
        saved = read(point)
        for index in range(count):
            parameters[index].data.copy_(saved["parameters"][index].data)
            optimizer.state[key(parameters, index, road)] = saved["states"][index]
        for gradient in list(gradients(LAST))[point:]:
            for index in range(count):
                update(optimizer, parameters, index, gradient, road)
        differences[point] = max(apart(pair) for pair in zip(parameters, end, strict=True))
    return differences


# The engine

ENGINE_POINTS = (2, 7, 13)
ENGINE_LAST = 20


def split(stage: int) -> float:
    """Largest difference of weights trained in several subgroups to those trained in one.

    ZeRO-2 makes a subgroup of each parameter group, ZeRO-3 of ``sub_group_size`` elements.
    """
    trained = []
    for pieces in (1, 4):
        engine = start(stage, pieces)
        if pieces > 1:
            subgroups_of(engine, stage, at_least=pieces)
        for step in range(ENGINE_LAST):
            train_step(engine, step)
        trained.append(weights(engine))
    return max(apart(pair) for pair in zip(*trained, strict=True))


def save_engine(folder: str, stage: int) -> None:
    """Train to the end, and save checkpoints on the way and the weights at the end."""
    import torch

    engine = start(stage, 4)
    for step in range(1, ENGINE_LAST + 1):
        train_step(engine, step)
        if step in ENGINE_POINTS:
            engine.save_checkpoint(f"{folder}/zero{stage}", tag=f"step{step}")
    torch.save(weights(engine), f"{folder}/zero{stage}/end.pt")


def resume_engine(folder: str, stage: int) -> dict[int, float]:
    """For each checkpoint: load, train to the end; the difference to no interruption."""
    import torch

    end = torch.load(f"{folder}/zero{stage}/end.pt")
    differences = {}
    for point in ENGINE_POINTS:
        engine = start(stage, 4)
        engine.load_checkpoint(f"{folder}/zero{stage}", tag=f"step{point}")
        for step in range(point + 1, ENGINE_LAST + 1):
            train_step(engine, step)
        differences[point] = max(apart(pair) for pair in zip(weights(engine), end, strict=True))
    return differences


def start(stage: int, pieces: int) -> Any:
    """An engine with the optimizer offloaded, whose native optimizer has so many subgroups."""
    join_world_of_one()
    import deepspeed
    import torch

    torch.manual_seed(0)
    # The rest of a subgroup that fills no vector takes another road in the native code, with
    # other bits. Here there is none.
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4))
    )
    size = 32 * 32 + 32
    groups = [{"params": list(layer.parameters())} for layer in model]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups if stage < 3 and pieces > 1 else model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": stage,
                "offload_optimizer": {"device": "cpu"},
                "sub_group_size": size if pieces > 1 else 10**9,
            },
        },
    )
    return engine


def subgroups_of(engine: Any, stage: int, at_least: int) -> None:
    optimizer = engine.optimizer
    flat = optimizer.fp16_groups if stage == 3 else optimizer.single_partition_of_fp32_groups
    if len(flat) < at_least:
        raise RuntimeError(f"ZeRO-{stage} made {len(flat)} subgroups")


def train_step(engine: Any, step: int) -> None:
    import torch

    batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
    engine.backward(engine(batch).square().mean())
    engine.step()


def weights(engine: Any) -> list[Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]


def join_world_of_one() -> None:
    import deepspeed
    import torch

    if torch.distributed.is_initialized():
        return
    os.environ["LOCAL_RANK"] = "0"
    # DeepSpeed would first compile its own collectives for CPUs. Gloo is enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


# Pieces


def equals(
    count: int, dtype: str = "float32", size: int = SIZE, **options: Any
) -> tuple[Any, list[Parameter]]:
    """An optimizer and its parameters, which are equal."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.manual_seed(0)
    # Numbers of 16 bits start at zero, where they are finest.
    start = torch.randn(size) if dtype == "float32" else torch.zeros(HALF_SIZE)
    start = start.to(getattr(torch, dtype))
    parameters = [torch.nn.Parameter(start.clone()) for _ in range(count)]
    return DeepSpeedCPUAdam(parameters, lr=1e-3, **options), parameters


def gradients(steps: int, size: int = SIZE) -> Iterator[Tensor]:
    import torch

    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(size, generator=generator)


def update(
    optimizer: Any, parameters: list[Parameter], index: int, gradient: Tensor, road: str
) -> None:
    """Step one parameter, as ZeRO-3 does with one subgroup after the other."""
    (group,) = optimizer.param_groups
    group["params"] = [parameters[index]]
    parameters[index].grad = gradient.to(parameters[index].dtype)
    if road == "step_subgroup":
        optimizer.step_subgroup(index)
    else:
        optimizer.step()
    group["params"] = parameters


def key(parameters: list[Parameter], index: int, road: str) -> Any:
    """What the optimizer's state of a parameter is found by."""
    return index if road == "step_subgroup" else parameters[index]


def apart(tensors: Sequence[Tensor]) -> float:
    """Largest difference of the tensors to the first one, infinite for NaN."""
    import torch

    first, *others = (t.detach().double() for t in tensors)
    largest = max((first - other).abs().max().item() for other in others)
    same = all(torch.equal(tensors[0], other) for other in tensors[1:])
    if largest != largest:
        return float("inf")
    return largest if largest or same else float("inf")
