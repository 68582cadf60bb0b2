"""Trains a model whose parameters have a gradient in some micro-batches only, and compares.

``launch`` runs many cases in one group of processes. The measure of right is plain torch, where a
missing gradient is zero in the sum over ranks and micro-batches.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from processes import World
from training import LOSS_SCALE, join_world, micro_batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

BRANCHES = 3
"""Layers of the same size that a micro-batch may use or not, beside one that none uses."""

BF16_OPTIMIZER = not Version("0.17.6") <= Version(version("deepspeed")) < Version("0.18.5")
"""The releases between take another optimizer for bf16-fp32 and ZeRO-1, and train wrong or not."""


@dataclass(frozen=True)
class Case:
    """One training run."""

    stage: int
    offload: bool
    used: tuple[tuple[tuple[int, ...], ...], ...]
    """For each step, micro-batch and rank, the branches in use, as bits. A case of one rank's
    pattern has it on all ranks."""
    optimizer: str = "sgd"
    dtype: str = "fp32"
    """fp32, fp16 or bf16; bf16-fp32 is bf16 with gradients accumulated in fp32."""
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    by_hand: bool = False
    """``gradient_accumulation_steps`` is 1, and the boundary set by hand."""
    clipping: float = 0.0
    groups: int = 1
    """Parameter groups."""
    overflow: tuple[int, int] = (-1, -1)
    """Step and micro-batch of rank 0 with a loss of infinity."""
    abandon: bool = False
    """Before each step one more backward, on each rank of another branch, that is thrown away with
    ``zero_grad``."""
    no_sync: bool = False
    """All but the last micro-batch of a step run under ``engine.no_sync()``."""
    frozen: tuple[int, ...] = ()
    """Steps in which the last layer is frozen."""
    emptied: tuple[int, ...] = ()
    """Steps before which ``zero_grad`` throws all gradients away."""
    checkpointed: bool = False
    """The branches run under reentrant checkpointing, and a parameter of the model comes last."""
    lone: bool = False
    """The first bit is no branch, but a parameter that has a bucket of its own."""
    heads: bool = False
    """A step is two backwards, with nothing set by hand: its own, and one of the layer that no
    branch uses."""
    skipped: tuple[int, ...] = ()
    """Steps that are not to be applied."""
    leaves: bool = True
    """The branches are a leaf module, as DeepSpeed asks for where ranks use different parameters of
    one under ZeRO-3."""
    adapters: bool = False
    """Each rank freezes the branches that it does not use."""
    unmanaged: bool = False
    """``managed_gradient_accumulation`` is off: every ``engine.step()`` is a step."""

    def __str__(self) -> str:
        words = [f"zero{self.stage}", "offload" if self.offload else "no-offload", self.optimizer]
        words += [self.dtype] + ["overlap"] * self.overlap_comm
        words += ["scattered"] * (not self.contiguous_gradients)
        words += ["by-hand"] * self.by_hand + [f"clip{self.clipping}"] * bool(self.clipping)
        words += [f"groups{self.groups}"] * (self.groups > 1)
        words += ["overflow{}.{}".format(*self.overflow)] * (self.overflow[0] >= 0)
        words += ["abandon"] * self.abandon + ["no-sync"] * self.no_sync
        words += [f"frozen{self.frozen}"] * bool(self.frozen) + ["heads"] * self.heads
        words += ["checkpointed"] * self.checkpointed + ["lone"] * self.lone
        words += [f"emptied{self.emptied}"] * bool(self.emptied)
        words += [f"skipped{self.skipped}"] * bool(self.skipped) + ["adapters"] * self.adapters
        words += ["unmanaged"] * self.unmanaged + ["no-leaves"] * (not self.leaves)
        steps = ("-".join(".".join(map(str, ranks)) for ranks in step) for step in self.used)
        return " ".join([*words, "_".join(steps)])

    @property
    def agreed(self) -> bool:
        """Whether all ranks use the same branches."""
        return all(len(set(ranks)) == 1 for step in self.used for ranks in step)

    @property
    def bf16_optimizer(self) -> bool:
        """Whether the optimizer is BF16_Optimizer, in the releases of ``BF16_OPTIMIZER``."""
        return self.stage == 1 and not self.offload and self.dtype == "bf16-fp32"

    @property
    def needs_order(self) -> bool:
        """Whether ranks put different gradients into the same places of a bucket, in a step that
        is to be applied."""
        buckets = self.stage < 3 and not self.bf16_optimizer
        return buckets and not (self.agreed or self.skipped)

    @property
    def has_empty(self) -> bool:
        """Whether the model has a parameter without elements: not every release knows them."""
        return bool(self.frozen) and self.stage < 3 and not self.offload

    @property
    def accumulated(self) -> int:
        """Micro-batches a step, as the configuration says it."""
        by_hand = self.by_hand or self.no_sync or self.unmanaged
        return 1 if by_hand else len(self.used[0])

    def branches(self, step: int, index: int, rank: int) -> int:
        ranks = self.used[step][index]
        return ranks[rank % len(ranks)]


def launch(
    cases: Sequence[Case], world_size: int, *, patched: bool, ordered: bool = False
) -> dict[Case, float | str]:
    """The largest error of a weight in each case; a string is the error a case ended with.

    ``ordered`` asks for reduction_order.
    """
    with World(worker, world_size, patched=patched) as world:
        return train_in(world, cases, ordered=ordered, timeout=300.0)


def train_in(
    world: World, cases: Sequence[Case], *, ordered: bool, timeout: float = 60.0
) -> dict[Case, float | str]:
    """The same in a world of ``worker`` that stays, and was ``ordered`` from its first case on."""
    request = {"ordered": ordered, "cases": [asdict(case) for case in cases]}
    return dict(zip(cases, world.ask(request, timeout=timeout), strict=True))


def build_model(case: Case) -> nn.Module:
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Branches(nn.Module):
        """One module, which ZeRO-3 gathers on all ranks, whatever a rank uses of it."""

        def __init__(self) -> None:
            super().__init__()
            for bit in range(BRANCHES):
                layer = nn.Linear(16, 16)
                self.register_parameter(f"weight{bit}", layer.weight)
                self.register_parameter(f"bias{bit}", layer.bias)

        def forward(self, hidden: Tensor, used: int) -> Tensor:
            for bit in range(BRANCHES):
                if used >> bit & 1:
                    weight, bias = (getattr(self, f"{name}{bit}") for name in ("weight", "bias"))
                    hidden = hidden + nn.functional.linear(hidden, weight, bias)
            return hidden * 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.branches = Branches()
            self.never = nn.Linear(4, 5)
            self.last = nn.Linear(16, 4)
            self.empty = nn.Parameter(torch.empty(0)) if case.has_empty else None
            self.scale = nn.Parameter(torch.ones(1)) if case.checkpointed else None
            self.lone = nn.Parameter(torch.ones(40, 8)) if case.lone else None

        def forward(self, x: Tensor, y: Tensor, used: int) -> Tensor:
            if used < 0:
                head: Tensor = self.never(x[:, :4]).float().square().mean()
                return head
            if self.lone is not None:
                x = x + self.lone.mean(0) if used & 1 else x
                used &= ~1
            hidden = torch.tanh(self.first(x))
            if case.checkpointed:
                hidden = checkpoint(self.branches, hidden, used, use_reentrant=True)
            else:
                hidden = self.branches(hidden, used)
            output: Tensor = self.last(hidden)
            if self.scale is not None:
                output = output * self.scale
            if self.empty is not None:
                output = output + self.empty.sum()
            return 10 * torch.nn.functional.mse_loss(output.float(), y)

    torch.manual_seed(0)
    return Model()


def dtypes_of(case: Case) -> list[torch.dtype]:
    """What the model is of, and what its gradients are summed in."""
    import torch

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    model, *sums = case.dtype.split("-")
    return [dtypes[name] for name in (model, *(sums or [model]))]


def groups_of(case: Case, parameters: Sequence[Any]) -> list[dict[str, Any]]:
    """The parameters of the model in one group, or the even ones and the odd ones."""
    return [{"params": list(parameters[i :: case.groups])} for i in range(case.groups)]


def build_optimizer(case: Case, parameters: Sequence[Any]) -> torch.optim.Optimizer:
    import torch

    groups = groups_of(case, parameters)
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.02, momentum=0.5)
    return torch.optim.Adam(groups, lr=1e-3)


def loss_of(case: Case, model: Any, step: int, index: int, rank: int, dtype: Any) -> Tensor:
    x, y = micro_batch(step, index, rank)
    loss: Tensor = model(x.to(dtype), y, case.branches(step, index, rank))
    return loss * float("inf") if (step, index) == case.overflow and rank == 0 else loss


def reference(case: Case, world_size: int) -> list[Tensor]:
    """Master weights (fp32) after all steps in plain torch, for all ranks in one process.

    Gradients are rounded where DeepSpeed rounds them, as in ``training.reference``.
    """
    import torch

    dtype, sums = dtypes_of(case)
    scale = LOSS_SCALE if dtype == torch.float16 else 1.0
    model = build_model(case).to(dtype)
    parameters = list(model.parameters())
    masters = [parameter.detach().float().clone() for parameter in parameters]
    optimizer = build_optimizer(case, masters)

    for step, micro_batches in enumerate(case.used):
        total = [torch.zeros_like(parameter, dtype=sums) for parameter in parameters]
        by_rank = [[torch.zeros_like(grad) for grad in total] for _ in range(world_size)]
        for index in range(len(micro_batches)):
            average = [torch.zeros_like(grad) for grad in total]
            for rank in range(world_size):
                loss = loss_of(case, model, step, index, rank, dtype) / case.accumulated * scale
                if case.heads:
                    loss = loss + model(*micro_batch(step, index, rank), -1)
                loss.backward()
                grads = tuple(parameter.grad for parameter in parameters)
                for parameter in parameters:
                    parameter.grad = None
                if step in case.emptied:
                    grads = (None,) * len(grads)
                elif step in case.frozen:
                    grads = (*grads[:-2], None, None)
                for k, grad in enumerate(grads):
                    if grad is not None:
                        average[k] += grad.to(sums) / world_size
                        by_rank[rank][k] += grad.to(sums)
            for k, grad in enumerate(average):
                total[k] += grad
        if case.stage == 1:
            # Whatever they are summed in, they are sent in the model's dtype.
            sent = [[(grad / world_size).to(dtype).to(sums) for grad in own] for own in by_rank]
            total = [sum(ranks[1:], start=ranks[0]) for ranks in zip(*sent, strict=True)]
        if step in case.skipped or not all(grad.isfinite().all() for grad in total):
            continue
        grads = [grad.float() / scale for grad in total]
        if case.clipping:
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            grads = [grad / max(1.0, (norm.item() + 1e-6) / case.clipping) for grad in grads]
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    return masters


def configuration(case: Case) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": case.stage,
        "overlap_comm": case.overlap_comm,
        "contiguous_gradients": case.contiguous_gradients,
        # Smaller than a branch's weight, larger than the others: see training.configuration.
        "reduce_bucket_size": 200,
        "allgather_bucket_size": 200,
        "stage3_param_persistence_threshold": 20,
    }
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config: dict[str, Any] = {}
    if case.dtype.startswith("bf16"):
        config = {"bf16": {"enabled": True}}
    elif case.dtype.startswith("fp16"):
        config = {"fp16": {"enabled": True, "loss_scale": LOSS_SCALE}}
    if case.dtype.endswith("-fp32"):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if case.unmanaged:
        config["managed_gradient_accumulation"] = False
    return config | {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": case.accumulated,
        "gradient_clipping": case.clipping,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def train(case: Case, rank: int, world_size: int) -> float:
    """Train under DeepSpeed and compare. A collective: each rank calls it."""
    from contextlib import nullcontext

    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, set_z3_leaf_modules

    model = build_model(case)
    if case.leaves and world_size > 1:
        set_z3_leaf_modules(model, [type(model.branches)])
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(case, list(model.parameters())),
        config=configuration(case),
    )
    dtype, _ = dtypes_of(case)
    for step, micro_batches in enumerate(case.used):
        if case.frozen:
            model.last.requires_grad_(step not in case.frozen)
        if case.abandon:
            if not case.unmanaged:
                engine.set_gradient_accumulation_boundary(False)
            x, y = micro_batch(step, 99, rank)
            engine.backward(engine(x.to(dtype), y, 1 + rank))
            engine.zero_grad()
        for index in range(len(micro_batches)):
            last = index == len(micro_batches) - 1
            for bit in range(BRANCHES * case.adapters):
                used = bool(case.branches(step, index, rank) >> bit & 1)
                for name in ("weight", "bias"):
                    getattr(model.branches, f"{name}{bit}").requires_grad_(used)
            if case.by_hand:
                engine.set_gradient_accumulation_boundary(last)
            with engine.no_sync() if case.no_sync and not last else nullcontext():
                engine.backward(loss_of(case, engine, step, index, rank, dtype))
            if case.heads:
                x, y = micro_batch(step, index, rank)
                engine.backward(engine(x.to(dtype), y, -1))
            if step in case.emptied:
                engine.zero_grad()
            if last or not (case.by_hand or case.no_sync or case.unmanaged):
                engine.step()
    model.requires_grad_(True)

    def weight_of(parameter: Any) -> Tensor:
        """In fp32, or where DeepSpeed has no other the parameter's own."""
        weight = safe_get_full_fp32_param(parameter)
        return parameter.detach() if weight is None else weight

    errors = [
        (weight_of(parameter).cpu().flatten() - right.flatten()).abs().max().item()
        for parameter, right in zip(model.parameters(), reference(case, world_size), strict=True)
        if right.numel()
    ]
    engine.destroy()
    return max(errors) if all(error == error for error in errors) else float("inf")


def worker(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    if request["ordered"]:
        os.environ["ZEROFIX_REDUCTION_ORDER"] = "1"
    import zerofix  # noqa: F401, I001
    import torch

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not torch.distributed.is_initialized():
        join_world(folder)
    answers: list[float | str] = []
    for each in request["cases"]:
        lists = {name: tuple(value) for name, value in each.items() if isinstance(value, list)}
        used = tuple(tuple(map(tuple, step)) for step in each["used"])
        case = Case(**each | lists | {"used": used})
        try:
            answers.append(train(case, rank, world_size))
        except Exception as error:
            if os.environ.get("TRAINING_TRACE"):
                import traceback

                traceback.print_exc()
            answers.append(f"{type(error).__name__}: {error}")
    if rank == 0:
        (folder / "answer.json").write_text(json.dumps(answers))
