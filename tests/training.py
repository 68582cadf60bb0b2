"""Trains a small model under DeepSpeed and in plain torch, and compares the weights.

``launch`` runs many scenarios in one group of processes, because importing DeepSpeed takes longer
than all of the training.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from processes import ask

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

LOSS_SCALE = 128.0
"""Of fp16. A power of two, so that scaling and unscaling are exact."""


@dataclass(frozen=True)
class Scenario:
    """One training run: a configuration, and how many backwards each step has."""

    stage: int
    offload: bool
    backwards: tuple[int, ...]
    ga_steps: int = 1
    """What the configuration says. Where ``backwards`` says otherwise, the boundary is set by
    hand with ``set_gradient_accumulation_boundary``."""
    optimizer: str = "sgd"
    dtype: str = "fp32"
    pin_memory: bool = False
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    branch: tuple[int, ...] = ()
    """The micro-batches of a step that use the model's branch, none being all of them. In the
    others its parameters have no gradient."""
    overflow: int = -1
    """The step whose first micro-batch has a loss of infinity."""

    no_reset: bool = False
    """Steps end without ``reset_cpu_buffers``, as one of parallel ZenFlow's does."""
    discard: str = ""
    """Before each step one more backward, that is thrown away: ``zero_grad`` or ``load``."""

    def __str__(self) -> str:
        words = [f"zero{self.stage}", "offload" if self.offload else "no-offload", self.optimizer]
        words += [self.dtype, f"ga{self.ga_steps}", "-".join(map(str, self.backwards))]
        words += ["pinned"] * self.pin_memory + ["overlap"] * self.overlap_comm
        words += ["scattered"] * (not self.contiguous_gradients)
        words += ["branch" + "".join(map(str, self.branch))] * bool(self.branch)
        words += [f"overflow{self.overflow}"] * (self.overflow >= 0)
        words += ["no-reset"] * self.no_reset + [f"discard-{self.discard}"] * bool(self.discard)
        return " ".join(words)

    @property
    def boundary_by_hand(self) -> bool:
        return any(count != self.ga_steps for count in self.backwards)

    def branched(self, micro_batch: int) -> bool:
        return not self.branch or micro_batch in self.branch


@dataclass(frozen=True)
class Outcome:
    """What rank 0 saw of a scenario."""

    error: float
    """Largest absolute difference of a master weight to plain torch."""
    digest: str
    """Of the master weights' bytes."""
    buffers: int
    """CPU buffers for partial sums that the optimizer holds at the end."""
    pinned: int
    """How many of them came from the accelerator's ``pin_memory``."""
    buffer_elements: int
    """Elements copied into or out of them, in all steps."""
    copied_elements: int
    """Elements copied by any ``Tensor.copy_``, in all steps."""
    left_over: int
    """Partial sums that no step has used."""


def launch(
    scenarios: Sequence[Scenario], world_size: int, *, patched: bool, timeout: float = 300.0
) -> dict[Scenario, Outcome | str]:
    """Run the scenarios on ``world_size`` ranks; a string is the error a scenario ended with.

    ``patched`` and errors are those of ``processes.ask``.
    """
    request = [asdict(scenario) for scenario in scenarios]
    answers = ask(worker, request, world_size, patched=patched, timeout=timeout)
    return {
        scenario: answer if isinstance(answer, str) else Outcome(**answer)
        for scenario, answer in zip(scenarios, answers, strict=True)
    }


def build_model(scenario: Scenario) -> nn.Module:
    """The same weights in every process, in fp32."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.second = nn.Linear(16, 16)
            self.branch = nn.Linear(16, 16)
            self.last = nn.Linear(16, 4)

        def forward(self, x: Tensor, y: Tensor, branched: bool) -> Tensor:
            hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
            if branched:
                hidden = hidden + self.branch(hidden)
            # Large enough that a lost micro-batch moves the weights by far more than rounding.
            return 10 * torch.nn.functional.mse_loss(self.last(hidden).float(), y)

    torch.manual_seed(0)
    return Model()


def micro_batch(step: int, index: int, rank: int) -> tuple[Tensor, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(1 + step * 10_000 + index * 100 + rank)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def build_optimizer(scenario: Scenario, parameters: Any) -> torch.optim.Optimizer:
    import torch

    if scenario.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.5)
    return torch.optim.Adam(parameters, lr=1e-3)


def precision(scenario: Scenario) -> torch.dtype:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[scenario.dtype]


def reference(scenario: Scenario, world_size: int) -> list[Tensor]:
    """Master weights (fp32) after all steps in plain torch, for all ranks in one process.

    Gradients are rounded where DeepSpeed rounds them: each is of the model's dtype, and so are
    their sum over micro-batches and their average over ranks. ZeRO-2 averages each micro-batch
    and sums the averages, ZeRO-1 averages the sums.
    """
    import torch

    dtype = precision(scenario)
    scale = LOSS_SCALE if dtype == torch.float16 else 1.0
    model = build_model(scenario).to(dtype)
    parameters = list(model.parameters())
    masters = [parameter.detach().float().clone() for parameter in parameters]
    optimizer = build_optimizer(scenario, masters)

    def gradients(step: int, index: int, rank: int) -> list[Tensor]:
        x, y = micro_batch(step, index, rank)
        loss = model(x.to(dtype), y, scenario.branched(index)) / scenario.ga_steps * scale
        if step == scenario.overflow and index == 0:
            loss = loss * float("inf")
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [
            torch.zeros_like(parameter) if grad is None else grad
            for parameter, grad in zip(parameters, grads, strict=True)
        ]

    def add(*terms: list[Tensor]) -> list[Tensor]:
        total = terms[0]
        for term in terms[1:]:
            total = [left + right for left, right in zip(total, term, strict=True)]
        return total

    def average(ranks: list[list[Tensor]]) -> list[Tensor]:
        return add(*([grad / world_size for grad in grads] for grads in ranks))

    for step, backwards in enumerate(scenario.backwards):
        grads = [[gradients(step, i, rank) for rank in range(world_size)] for i in range(backwards)]
        if scenario.stage == 1:
            total = average([add(*of_rank) for of_rank in zip(*grads, strict=True)])
        else:
            total = add(*(average(of_ranks) for of_ranks in grads))
        if not all(grad.isfinite().all() for grad in total):
            continue
        for master, grad in zip(masters, total, strict=True):
            master.grad = grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    return masters


def configuration(scenario: Scenario) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": scenario.stage,
        "overlap_comm": scenario.overlap_comm,
        "contiguous_gradients": scenario.contiguous_gradients,
        # Smaller than one weight, larger than the others: several buckets, and the road of a
        # parameter that exceeds its bucket.
        "reduce_bucket_size": 200,
        "allgather_bucket_size": 200,
    }
    if scenario.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": scenario.pin_memory}
    half: dict[str, Any] = {}
    if scenario.dtype == "bf16":
        half = {"bf16": {"enabled": True}}
    elif scenario.dtype == "fp16":
        half = {"fp16": {"enabled": True, "loss_scale": LOSS_SCALE}}
    return half | {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": scenario.ga_steps,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


@dataclass
class Copies:
    """Elements copied by ``Tensor.copy_``."""

    all: int = 0
    buffers: int = 0
    """Those into or out of the buffers for partial sums."""


@contextmanager
def counting_copies(buffers: dict[int, Tensor]) -> Iterator[Copies]:
    import torch

    copies = Copies()
    original = torch.Tensor.copy_

    def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        ends = {tensor.untyped_storage().data_ptr() for tensor in (self, src)}
        copies.all += self.numel()
        if any(buffer.untyped_storage().data_ptr() in ends for buffer in buffers.values()):
            copies.buffers += self.numel()
        return original(self, src, non_blocking)

    torch.Tensor.copy_ = copy_  # type: ignore[assignment,method-assign]
    try:
        yield copies
    finally:
        torch.Tensor.copy_ = original  # type: ignore[method-assign]


def train(scenario: Scenario, rank: int, world_size: int) -> Outcome:
    """Train under DeepSpeed and compare. A collective: each rank calls it."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param

    model = build_model(scenario)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(scenario, model.parameters()),
        config=configuration(scenario),
    )
    device = get_accelerator().current_device_name()
    buffers: dict[int, Tensor] = getattr(engine.optimizer, "accumulated_grads_in_cpu", {})
    if scenario.no_reset:
        engine.optimizer.reset_cpu_buffers = lambda: None
    with counting_copies(buffers) as copies:
        for step, backwards in enumerate(scenario.backwards):
            if scenario.discard:
                state = engine.optimizer.state_dict()
                engine.set_gradient_accumulation_boundary(False)
                x, y = (tensor.to(device) for tensor in micro_batch(step, 99, rank))
                engine.backward(engine(x.to(precision(scenario)), y, True))
                if scenario.discard == "load":
                    states = [None] * world_size
                    torch.distributed.all_gather_object(states, state)
                    engine.optimizer.load_state_dict(states)
                else:
                    engine.zero_grad()
                    engine.optimizer.zero_grad()
            for index in range(backwards):
                if scenario.boundary_by_hand:
                    engine.set_gradient_accumulation_boundary(index == backwards - 1)
                x, y = (tensor.to(device) for tensor in micro_batch(step, index, rank))
                loss = engine(x.to(precision(scenario)), y, scenario.branched(index))
                if step == scenario.overflow and index == 0:
                    loss = loss * float("inf")
                engine.backward(loss)
                if not scenario.boundary_by_hand:
                    engine.step()
            if scenario.boundary_by_hand:
                engine.step()

    weights = [safe_get_full_fp32_param(parameter).cpu() for parameter in model.parameters()]
    errors = [
        (weight.flatten() - expected.flatten()).abs().max().item()
        for weight, expected in zip(weights, reference(scenario, world_size), strict=True)
    ]
    stale = any(
        not torch.equal(parameter.detach().cpu().flatten(), weight.to(parameter.dtype).flatten())
        for parameter, weight in zip(model.parameters(), weights, strict=True)
    )
    if stale:
        raise RuntimeError("the model's weights are not those of the optimizer")
    return Outcome(
        error=max(errors) if all(error == error for error in errors) else float("inf"),
        digest=hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights)).hexdigest(),
        buffers=len(buffers),
        pinned=sum(
            getattr(buffer, "went_through_pin_memory", False) for buffer in buffers.values()
        ),
        buffer_elements=copies.buffers,
        copied_elements=copies.all,
        left_over=len(getattr(engine.optimizer, "partial_sums_in_cpu", ())),
    )


def prepare_accelerator() -> None:
    """Record what ``pin_memory`` returns; on a CPU, let it copy and let fp16 through.

    The CPU accelerator's ``pin_memory`` returns its argument. Pinning returns other memory, and
    whoever keeps the argument is wrong: a copy shows that without CUDA.
    """
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.torch import TorchBackend

    accelerator = get_accelerator()
    pin = accelerator.pin_memory
    on_cpu = accelerator.device_name() == "cpu"

    def pin_memory(tensor: Tensor, align_bytes: int = 1) -> Tensor:
        pinned = tensor.clone() if on_cpu else pin(tensor, align_bytes)
        pinned.went_through_pin_memory = True  # type: ignore[union-attr]
        return pinned

    accelerator.pin_memory = pin_memory
    if on_cpu:
        # DeepSpeed would first compile its own collectives for CPUs. Gloo is enough.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # 0.18.7 to 0.18.9 flatten weights where there is memory for it, and on a CPU with several
        # ranks that road ends at the first step ("Output 0 of Split is a view"). The other
        # road, for a full device, is that of all releases before.
        accelerator.available_memory = lambda *_: 0
        accelerator.is_fp16_supported = lambda: True
        accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
        # ZeRO-3 waits for the last of several gathers. With NCCL they end in their order, with
        # gloo in any.
        TorchBackend.all_gather_into_tensor = _waiting(TorchBackend.all_gather_into_tensor)


def _waiting(gather: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_into_tensor(*args: Any, **kwargs: Any) -> Any:
        handle = gather(*args, **kwargs)
        if handle is not None:
            handle.wait()
        return handle

    return all_gather_into_tensor


def join_world(folder: Path) -> None:
    """Join the ranks of ``processes.World``, whose store is in the folder, for small trainings."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    torch.set_num_threads(1)
    # Each engine collects garbage several times: without this over all that is imported.
    gc.freeze()
    prepare_accelerator()
    deepspeed.init_distributed(
        get_accelerator().communication_backend_name(),
        auto_mpi_discovery=False,
        init_method=f"file://{folder}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def worker(folder: Path) -> None:
    import zerofix  # noqa: F401, I001
    import torch

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join_world(folder)
    answers: list[dict[str, Any] | str] = []
    for request in json.loads((folder / "request.json").read_text()):
        tuples = {name: tuple(request[name]) for name in ("backwards", "branch")}
        scenario = Scenario(**request | tuples)
        try:
            answers.append(asdict(train(scenario, rank, world_size)))
        except Exception as error:
            if os.environ.get("TRAINING_TRACE"):
                import traceback

                traceback.print_exc()
            answers.append(f"{type(error).__name__}: {error}")
    if rank == 0:
        (folder / "answer.json").write_text(json.dumps(answers))
    torch.distributed.destroy_process_group()
