"""Trains under ZeRO-3 offload twice, with and without SuperOffload, and compares each step.

``launch`` runs many scenarios in one group of processes. Plain offload with DeepSpeedCPUAdam is
the measure of right, to the last bit.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import json
import os
import signal
import subprocess
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from select import select
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from processes import ask

if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTH = 12
HYPERPARAMETERS = (
    {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True},
    {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": 0.0, "bias_correction": False},
    {"lr": 5e-2, "betas": (0.5, 0.9), "eps": 1e-6, "weight_decay": 0.01, "bias_correction": True},
)
CLIPPING = {"off": 0.0, "never": 1e6, "sometimes": 100.0, "always": 1e-3}


@dataclass(frozen=True)
class Scenario:
    """One training run."""

    groups: int = 1
    sub_group_size: int = 10**9
    """1 makes a subgroup of each parameter."""
    ga_steps: int = 1
    clipping: str = "off"
    dtype: str = "bf16"
    overflow: int = -1
    """The step whose loss is infinite."""
    ratio: float = 1.0
    adamw: bool = True
    bias_correction: bool = True
    frozen: bool = False
    """One layer needs no gradient."""
    unused: str = ""
    """``never``: one layer has no gradient. ``sometimes``: not in the odd steps."""
    schedule: bool = False
    """Learning rate, betas, eps and weight decay change with each step."""
    between: str = ""
    """What is done between backward and step in step 2: ``gradient``, ``weights`` and ``state``
    are written to, ``refresh`` takes the weights from the model's, ``lr`` is changed, ``discard``
    throws the backward away, ``twice`` runs one more."""
    resume: str = ""
    """After step 2 a checkpoint is saved, and loaded after step 4. Then ``same`` goes on in the
    same engine, ``fresh`` in a new one, ``from-plain`` with SuperOffload from plain offload's
    checkpoint, ``to-plain`` in stock's plain offload. ``to-stock`` ends with loading it into
    stock's SuperOffload."""
    steps: int = 6

    def __str__(self) -> str:
        default = Scenario()
        words = [
            f"{name}={value}"
            for name, value in asdict(self).items()
            if value != getattr(default, name)
        ]
        return " ".join(words) or "default"


@dataclass(frozen=True)
class Outcome:
    """What the ranks saw of a scenario, the worst of them."""

    error: float
    """Largest absolute difference of a master weight to plain offload, after any step."""
    first: int
    """The first step that is not the same to the bit; -1 if all are."""
    state: bool
    """Whether the optimizer states that the public functions give are the same to the bit."""
    model: bool
    """Whether the model's weights are the same to the bit."""
    kept: int
    """Steps on subgroups that were computed during the backward, and counted."""
    subgroups: int


def launch(
    scenarios: Sequence[Scenario], world_size: int, *, patched: bool, timeout: float = 900.0
) -> dict[Scenario, Outcome | str]:
    """Run the scenarios on ``world_size`` ranks; a string is the error a scenario ended with.

    ``patched`` imports zerofix as a user would; otherwise only the fixes of SuperOffload are off:
    what the others repair has tests of its own.
    """
    request = {"patched": patched, "scenarios": [asdict(scenario) for scenario in scenarios]}
    answers = ask(worker, request, world_size, patched=True, timeout=timeout)
    return {
        scenario: answer if isinstance(answer, str) else Outcome(**answer)
        for scenario, answer in zip(scenarios, answers, strict=True)
    }


def build_model(scenario: Scenario) -> nn.Module:
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
            self.branch = nn.Linear(WIDTH, WIDTH)
            self.never = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, branched: bool) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            if branched:
                x = x + self.branch(x)
            if scenario.unused != "never":
                x = x + self.never(x)
            return x.float().square().mean() * 10

    torch.manual_seed(0)
    model = Model()
    if scenario.frozen:
        model.layers[2].requires_grad_(False)
    return model


def build_optimizer(scenario: Scenario, model: nn.Module) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = []
    for index in range(scenario.groups):
        # Groups of different sizes.
        count = len(trained) if index == scenario.groups - 1 else 2 + 3 * index
        own, trained = trained[:count], trained[count:]
        correction = scenario.bias_correction and HYPERPARAMETERS[index]["bias_correction"]
        groups.append(HYPERPARAMETERS[index] | {"params": own, "bias_correction": correction})
    return DeepSpeedCPUAdam(groups, adamw_mode=scenario.adamw)


def configuration(scenario: Scenario, *, super_offload: bool) -> dict[str, Any]:
    half: dict[str, Any] = {}
    if scenario.dtype == "bf16":
        half = {"bf16": {"enabled": True}}
    elif scenario.dtype == "fp16":
        half = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}}
    return half | {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": scenario.ga_steps,
        "gradient_clipping": CLIPPING[scenario.clipping],
        "zero_optimization": {
            "stage": 3,
            # Several buckets, and parameters that stay whole.
            "reduce_bucket_size": 300,
            "stage3_param_persistence_threshold": 20,
            "sub_group_size": scenario.sub_group_size,
            "offload_optimizer": {
                "device": "cpu",
                "ratio": scenario.ratio,
                "super_offload": super_offload,
            },
        },
    }


class Run:
    """One engine and what its weights were after each step."""

    def __init__(self, scenario: Scenario, rank: int, *, super_offload: bool) -> None:
        self.scenario, self.rank, self.super_offload = scenario, rank, super_offload
        self.weights: list[list[Tensor]] = []
        self.kept = 0
        self.start()
        self.weights.append(self._weights())

    def start(self) -> None:
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        self.model = build_model(self.scenario)
        accelerator, optimizer = get_accelerator(), build_optimizer(self.scenario, self.model)
        if self.scenario.ratio < 1.0:
            # Another name of the CPU, for the subgroups that are to be on the accelerator.
            accelerator._name = "cpu:0"
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=optimizer,
            config=configuration(self.scenario, super_offload=self.super_offload),
        )
        accelerator._name = "cpu"
        self.optimizer = self.engine.optimizer

    def train(self, steps: range) -> None:
        for step in steps:
            self._schedule(step)
            if self.scenario.between == "discard" and step == 2:
                self._backward(step, 99)
                self.engine.zero_grad()
                self.optimizer.zero_grad()
            for index in range(self.scenario.ga_steps):
                self._backward(step, index)
                if index < self.scenario.ga_steps - 1:
                    self.engine.step()
            if step == 2:
                self._between(step)
            before = getattr(self.optimizer, "superoffload_cpu_optimizer", None)
            if hasattr(before, "scale"):
                self._count(before)
            self.engine.step()
            self.weights.append(self._weights())

    def states(self) -> list[Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        try:
            return [
                safe_get_full_optimizer_state(parameter, name).clone()
                for parameter in self.model.parameters()
                if parameter.requires_grad
                for name in ("exp_avg", "exp_avg_sq")
            ]
        except KeyError:  # stock's SuperOffload has none
            return []

    def model_weights(self) -> list[Tensor]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            return [parameter.detach().clone() for parameter in self.model.parameters()]

    def destroy(self) -> None:
        self.engine.destroy()
        if not hasattr(getattr(self.optimizer, "superoffload_cpu_optimizer", None), "scale"):
            worker = getattr(self.optimizer, "superoffload_cpu_optimizer", None)
            if worker is not None:  # stock leaves it behind
                worker.close()

    def _weights(self) -> list[Tensor]:
        return [flat.detach().clone() for flat in self.optimizer.fp32_partitioned_groups_flat]

    def _count(self, speculation: Any) -> None:
        """Count the steps that ``end_step`` finds kept."""

        def end_step() -> None:
            self.kept += len(speculation._kept)
            type(speculation).end_step(speculation)

        speculation.end_step = end_step

    def _backward(self, step: int, index: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(step * 1000 + index * 10 + self.rank)
        x = torch.randn(4, WIDTH, generator=generator)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        branched = self.scenario.unused != "sometimes" or step % 2 == 0
        loss = self.engine(x.to(dtype[self.scenario.dtype]), branched)
        # Large gradients in some steps, for `sometimes`.
        loss = loss * (100.0 if step in (1, 4) else 1.0)
        if step == self.scenario.overflow:
            loss = loss * float("inf")
        self.engine.backward(loss)

    def _schedule(self, step: int) -> None:
        if self.scenario.schedule:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9
                group["betas"] = (group["betas"][0] * 0.99, group["betas"][1] * 0.999)
                group["eps"] *= 2
                group["weight_decay"] += 0.01

    def _between(self, step: int) -> None:
        from deepspeed.utils import (
            safe_get_full_fp32_param,
            safe_get_full_grad,
            safe_get_full_optimizer_state,
            safe_set_full_fp32_param,
            safe_set_full_grad,
            safe_set_full_optimizer_state,
        )

        parameter = self.model.layers[1].weight
        match self.scenario.between:
            case "gradient":
                safe_set_full_grad(parameter, safe_get_full_grad(parameter) * 2)
            case "weights":
                safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 2)
            case "state":
                value = safe_get_full_optimizer_state(parameter, "exp_avg") * 2
                safe_set_full_optimizer_state(parameter, value, "exp_avg")
            case "refresh":
                self.optimizer.refresh_fp32_params()
            case "lr":
                self.optimizer.param_groups[0]["lr"] *= 2
            case "twice":
                self._backward(step, 98)


def train(scenario: Scenario, rank: int, folder: Path) -> Outcome:
    """Train with and without SuperOffload and compare. A collective: each rank calls it."""
    import torch

    checkpoint = folder / "checkpoint"
    runs: list[Run] = []
    states: list[list[Tensor]] = []
    models: list[list[Tensor]] = []
    for super_offload in (False, True):
        run = Run(scenario, rank, super_offload=super_offload)
        runs.append(run)
        try:
            if not scenario.resume:
                run.train(range(scenario.steps))
            else:
                resume(run, checkpoint / str(super_offload), scenario.steps)
            states.append(run.states())
            models.append(run.model_weights())
        finally:
            run.destroy()
            # DeepSpeed collects garbage with each engine, and keeps much of the ones before.
            gc.collect()
            gc.freeze()
    plain, ours = runs
    errors = [
        max((one - other).abs().max().item() for one, other in zip(*weights, strict=True))
        for weights in zip(plain.weights, ours.weights, strict=True)
    ]

    def equal(pair: Sequence[list[Tensor]]) -> bool:
        one, other = pair
        return len(one) == len(other) and all(map(torch.equal, one, other))

    same = [equal(weights) for weights in zip(plain.weights, ours.weights, strict=True)]
    outcome = Outcome(
        error=max(error if error == error else float("inf") for error in errors),
        first=-1 if all(same) else same.index(False),
        state=equal(states),
        model=equal(models),
        kept=ours.kept,
        subgroups=len(ours.weights[0]),
    )
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, outcome)
    return max(everyone, key=lambda one: (one.first >= 0, not one.state, not one.model, one.error))


def resume(run: Run, folder: Path, steps: int) -> None:
    """Save after three steps, go on to five, load, and go on to the end."""
    kind = run.scenario.resume
    run.train(range(3))
    run.engine.save_checkpoint(str(folder), tag="three")
    run.train(range(3, 5))
    with stock() if kind.startswith("to-") else contextlib.nullcontext():
        if kind != "same":
            run.destroy()
            run.super_offload = run.super_offload and kind != "to-plain"
            run.start()
        if kind == "from-plain" and run.super_offload:
            folder = folder.with_name("False")
        run.engine.load_checkpoint(str(folder), tag="three")
        if kind == "to-stock":
            run.weights.append(run._weights())
        else:
            run.train(range(3, steps))


@contextlib.contextmanager
def stock() -> Iterator[None]:
    """DeepSpeed without the fixes of SuperOffload."""
    import zerofix

    applied = [fix.name for fix in zerofix.status().fixes if fix.state.value == "applied"]
    ours = [name for name in applied if name.startswith("superoffload")]
    zerofix.revert()
    for name in applied:
        if name not in ours:
            zerofix.apply(name)
    try:
        yield
    finally:
        for name in ours:
            zerofix.apply(name)


class Forked:
    """Stands in for the worker's ``subprocess.Popen``, in a hundredth of its time.

    The worker's imports take longer than all of the training. A fork of the rank has them.
    """

    def __init__(self, command: Sequence[str], *, pass_fds: tuple[int, int], **_: Any) -> None:
        from zerofix.superoffload.worker import serve

        # In Python 3.10 a fork beside threads, as gloo's, may wait for ever before it gets here.
        begun, begin = os.pipe()
        self.pid = os.fork()
        while self.pid and not select([begun], [], [], 2.0)[0]:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = os.fork()
        if self.pid == 0:
            os.write(begin, b".")
            # Also the other end of the connection, whose end is to be noticed.
            for number in os.listdir("/proc/self/fd"):
                if int(number) > 2 and int(number) not in pass_fds:
                    with contextlib.suppress(OSError):
                        os.close(int(number))
            try:
                serve(*pass_fds)
            finally:
                os._exit(0)
        os.close(begun)
        os.close(begin)

    def wait(self, timeout: float | None = None) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_workers() -> None:
    """Fork the workers, ours and stock's, instead of starting Python anew."""
    import torch.multiprocessing
    from deepspeed.runtime.superoffload import superoffload_utils

    from zerofix.superoffload import client

    client.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
    forking = torch.multiprocessing.get_context("fork")
    superoffload_utils.mp = SimpleNamespace(get_context=lambda _: forking)
    # What `stand_in` puts there looks for the real one, in a process that starts anew.
    spec = importlib.util.spec_from_file_location("stock", superoffload_utils.__file__)
    stock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stock)

    def work(*args: Any) -> None:
        empty = torch.empty
        torch.empty = lambda *sizes, pin_memory=False, **kwargs: empty(*sizes, **kwargs)
        stock.superoffload_optimizer_worker(*args)

    superoffload_utils.superoffload_optimizer_worker = work


def prepare_accelerator() -> None:
    """What DeepSpeed needs to run SuperOffload on a CPU, in fp16 as well."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from zerofix.repro._superoffload import stand_in

    stand_in()
    accelerator = get_accelerator()
    assert accelerator.device_name() == "cpu"
    # It runs a program of its own, for each bucket.
    count = accelerator.device_count()
    accelerator.device_count = lambda: count
    # DeepSpeed would first compile its own collectives for CPUs. Gloo is enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Before 0.19.8 DeepSpeed waits for the last of several gathers. NCCL's end in turn, gloo's do
    # not: 1 in 75 trainings on two ranks goes on with half-gathered weights, plain offload's too.
    gather = deepspeed.comm.all_gather_into_tensor

    def gather_at_once(*args: Any, **kwargs: Any) -> Any:
        work = gather(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    deepspeed.comm.all_gather_into_tensor = gather_at_once
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]


def worker(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    if not request["patched"]:
        os.environ |= {"ZEROFIX_SUPEROFFLOAD": "0", "ZEROFIX_SUPEROFFLOAD_STEP": "0"}
    import cpuinfo

    # It runs a program of its own, for each optimizer.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    import zerofix  # noqa: F401, I001
    import deepspeed
    import torch

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    # Each engine collects garbage several times: without this over all that is imported.
    gc.freeze()
    prepare_accelerator()
    fork_workers()
    deepspeed.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
    )
    answers: list[dict[str, Any] | str] = []
    for number, wanted in enumerate(request["scenarios"]):
        print(Scenario(**wanted), flush=True)
        try:
            outcome = train(Scenario(**wanted), rank, folder / str(number))
            answers.append(asdict(outcome))
        except Exception as error:
            traceback.print_exc()
            answers.append(f"{type(error).__name__}: {error}")
    if rank == 0:
        (folder / "answer.json").write_text(json.dumps(answers))
    torch.distributed.destroy_process_group()
