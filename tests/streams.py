"""Trains under DeepSpeed with gradients produced on several virtual streams.

The measure of right is the same training without ``overlap_comm`` on a plain CPU, that has no
streams: bit for bit the same weights, and nothing reported.
"""

from __future__ import annotations

import gc
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from processes import ask

if TYPE_CHECKING:
    from torch import Tensor

    from zerofix.testing import Device


@dataclass(frozen=True)
class Layout:
    """One training run: a model, a configuration, streams, and the order in which they run."""

    stage: int = 2
    overlap_comm: bool = True
    bucket: int = 200
    """Elements of a bucket."""
    producers: int = 2
    """Streams that the parameters' gradients are dealt to in turn; 0: all on the default one."""
    schedule: str | int = "lazy"
    widths: tuple[int, ...] = (8, 16, 16, 4)
    """Of the model's linear layers: weights of 128, 256 and 64 elements, biases of 16, 16, 4."""
    offload: bool = False
    reduce_scatter: bool = True
    contiguous_gradients: bool = True
    ga_steps: int = 1
    dtype: str = "fp32"
    accumulates: bool = False
    """Gradients in fp32, where the model is of bf16: they have a tensor of their own."""
    steps: int = 3
    waiting: int = 0
    """Bytes of gradients that wait to be copied together; 0: DeepSpeed's copies, one by one."""
    watched: str = ""
    """Where a user's hooks look at the gradients in backward: of the ``parameter``, or of the
    ``node`` that accumulates them."""

    def __str__(self) -> str:
        words = [f"zero{self.stage}", "overlap" if self.overlap_comm else "no-overlap"]
        words += [f"bucket{self.bucket}", f"producers{self.producers}", str(self.schedule)]
        words += ["x".join(map(str, self.widths))] * (self.widths != Layout.widths)
        words += ["offload"] * self.offload + ["all-reduce"] * (not self.reduce_scatter)
        words += ["scattered"] * (not self.contiguous_gradients)
        words += [f"ga{self.ga_steps}"] * (self.ga_steps > 1) + [self.dtype] * (
            self.dtype != "fp32"
        )
        words += ["accumulates"] * self.accumulates
        words += [f"waiting{self.waiting}"] * (self.waiting > 0) + [
            f"watched-{self.watched}"
        ] * bool(self.watched)
        return " ".join(words)

    @property
    def elements(self) -> list[int]:
        """Of the parameters, in the order in which backward makes their gradients: nearly."""
        pairs = zip(self.widths, self.widths[1:], strict=False)
        return [n for a, b in pairs for n in (a * b, b)][::-1]

    @property
    def oversized(self) -> bool:
        return max(self.elements) > self.bucket

    @property
    def reduces_in_backward(self) -> bool:
        """Whether a bucket is full, and reduced, before backward ends and joins the streams."""
        return sum(self.elements) > self.bucket and (self.stage == 2 or self.overlap_comm)


def random_layouts(count: int, seed: int) -> list[Layout]:
    """Layouts whose buckets, gradients, streams and schedules are drawn with a seed.

    Not by hypothesis: its first examples resemble each other, and all are to train in one process.
    """
    drawn = random.Random(seed)
    return [
        Layout(
            stage=drawn.choice([1, 2]),
            overlap_comm=drawn.random() < 0.7,
            bucket=drawn.choice([30, 64, 100, 150, 250, 400, 2000]),
            producers=drawn.randint(0, 3),
            schedule=drawn.choice(["lazy", "lazy", "in-order", drawn.randrange(2**16)]),
            widths=tuple(drawn.randint(1, 20) for _ in range(drawn.randint(3, 6))),
            offload=drawn.random() < 0.3,
            reduce_scatter=drawn.random() < 0.5,
            contiguous_gradients=drawn.random() < 0.8,
            ga_steps=drawn.choice([1, 1, 2]),
            steps=2,
        )
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Outcome:
    """What became of a layout. Reports are of all ranks, each once."""

    error: float
    """Largest absolute difference of a weight to the measure of right; infinity for NaN."""
    exact: bool
    """Every weight on every rank has the same bits."""
    races: list[str] = field(default_factory=list)
    """Unordered pairs of accesses, as ``zerofix.testing.Race`` prints them."""
    frees: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """Of rank 0: calls that order streams, in all steps and without the engine's construction;
    copies that were made together, their launches, and the most bytes that waited for another."""

    @property
    def right(self) -> bool:
        return self.exact and not self.races and not self.frees


def launch(
    layouts: Sequence[Layout], world_size: int, *, patched: bool, timeout: float = 240.0
) -> dict[Layout, Outcome]:
    """Run the layouts in one group of ``world_size`` processes.

    ``patched`` and errors are those of ``processes.ask``.
    """
    request = [asdict(layout) for layout in layouts]
    answers = ask(worker, request, world_size, patched=patched, timeout=timeout)
    return {layout: Outcome(**answer) for layout, answer in zip(layouts, answers, strict=True)}


def configuration(layout: Layout) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": layout.stage,
        "overlap_comm": layout.overlap_comm,
        "contiguous_gradients": layout.contiguous_gradients,
        "reduce_scatter": layout.reduce_scatter,
        "reduce_bucket_size": layout.bucket,
        "allgather_bucket_size": 200,
        "stage3_param_persistence_threshold": 0,
    }
    if layout.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": layout.ga_steps,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": layout.dtype == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32" if layout.accumulates else None},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def train(layout: Layout, rank: int, device: Device | None) -> list[Tensor]:
    """The model's weights after training, and what hooks saw. A collective: each rank calls it."""
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    from zerofix.testing import Stream, place_gradients

    full = safe_get_full_fp32_param if layout.stage == 3 else torch.Tensor.detach
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in zip(layout.widths, layout.widths[1:], strict=False):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers[:-1])
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5),
        config=configuration(layout),
    )
    parameters = list(model.parameters())
    seen: list[Tensor] = []

    def look(parameter: Tensor) -> None:
        seen.append(parameter.grad.clone())
        if layout.watched == "parameter":
            # The memory itself, to find the reduced gradient there.
            seen.append(parameter.grad.detach())

    nodes = []
    for parameter in parameters if layout.watched else ():
        if layout.watched == "parameter":
            parameter.register_post_accumulate_grad_hook(look)
        else:
            nodes.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
            nodes[-1].register_hook(lambda *_, parameter=parameter: look(parameter))
    placement = {}
    if device is not None:
        device.counts.clear()
        streams = [Stream() for _ in range(layout.producers)]
        if streams:
            placement = {p: streams[i % len(streams)] for i, p in enumerate(parameters)}
    generator = torch.Generator().manual_seed(rank + 1)
    with place_gradients(placement):
        for _ in range(layout.steps * layout.ga_steps):
            x = torch.randn(6, layout.widths[0], generator=generator).to(parameters[0].dtype)
            y = torch.randn(6, layout.widths[-1], generator=generator)
            seen.clear()
            # Large enough that a lost gradient moves the weights by far more than rounding.
            loss = 10 * torch.nn.functional.mse_loss(engine(x).float(), y)
            engine.backward(loss)
            engine.step()
        found = [tensor.clone() for tensor in (*map(full, parameters), *seen)]
    if layout.stage < 3:  # 0.16.0 cannot destroy ZeRO-3 without contiguous_gradients
        engine.destroy()
    return found


@contextmanager
def copies_wait(layout: Layout) -> Iterator[Counter[str]]:
    """Make gradients wait where a CPU's would not, and be copied by the kernel, interpreted."""
    import triton
    from packaging.version import Version

    import zerofix.kernels.pack as kernel
    from zerofix.kernels import pending, provenance

    if Version(triton.__version__) < kernel._OLDEST_TRITON:  # how they wait is tested all the same
        kernel._by_triton, kernel._why_no_triton = kernel._by_torch, lambda _: ""

    counts: Counter[str] = Counter()
    pack, bound = pending.pack, provenance.BOUND

    def counted(sources: list[Tensor], destinations: list[Tensor]) -> None:
        counts.update(launches=1, copies=len(sources))
        waited = sum(source.nbytes for source in sources[:-1])
        counts["bytes"] = max(counts["bytes"], waited)
        pack(sources, destinations)

    if layout.waiting:
        os.environ["ZEROFIX_BUCKET_COPY"] = "triton"
        provenance.BOUND, pending.pack = layout.waiting, counted
    try:
        yield counts
    finally:
        os.environ.pop("ZEROFIX_BUCKET_COPY", None)
        provenance.BOUND, pending.pack = bound, pack


def compare(layout: Layout, rank: int, world_size: int) -> Outcome:
    import torch
    from torch.distributed import all_gather_object

    from zerofix.testing import Race
    from zerofix.testing.accelerator import deepspeed_streams

    expected = train(replace(layout, overlap_comm=False), rank, None)
    with deepspeed_streams(layout.schedule) as device, copies_wait(layout) as waited:
        found = train(layout, rank, device)
        counts = {**device.counts, **waited}
    pairs = list(zip(found, expected, strict=True))
    error = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
    races = [str(report) for report in device.reports if isinstance(report, Race)]
    frees = [str(report) for report in device.reports if not isinstance(report, Race)]
    exact = all(torch.equal(a, b) for a, b in pairs)
    if any(a.isnan().any() for a in found):
        error = float("inf")
    ranks: list[Any] = [None] * world_size
    all_gather_object(ranks, (error, exact, races, frees))
    return Outcome(
        error=max(other[0] for other in ranks),
        exact=all(other[1] for other in ranks),
        races=sorted({race for other in ranks for race in other[2]}),
        frees=sorted({free for other in ranks for free in other[3]}),
        counts=counts,
    )


@contextmanager
def group(folder: Path, rank: int, world_size: int) -> Iterator[None]:
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed would first compile its own collectives for CPUs. Gloo is enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Without contiguous_gradients DeepSpeed reduces tensors of the type torch.DEVICE.FloatTensor
    # and the like. A CPU's have no device in the name, and it would reduce nothing.
    name = torch.Tensor.type

    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = name(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cpu.") if isinstance(answer, str) else answer

    torch.Tensor.type = type_  # type: ignore[assignment,method-assign]
    # See training.prepare_accelerator: 0.18.7 to 0.18.9 crash where there is memory.
    get_accelerator().available_memory = lambda *_: 0
    deepspeed.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
    )
    yield
    torch.distributed.destroy_process_group()


def worker(folder: Path) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import zerofix  # noqa: F401, I001
    import deepspeed  # noqa: F401
    import torch

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    # Each engine collects garbage several times: without this over all that is imported.
    gc.freeze()
    answers = []
    with group(folder, rank, world_size):
        for request in json.loads((folder / "request.json").read_text()):
            layout = Layout(**request | {"widths": tuple(request["widths"])})
            answers.append(asdict(compare(layout, rank, world_size)))
            gc.freeze()  # DeepSpeed's engines are never freed whole
        if rank == 0:
            (folder / "answer.json").write_text(json.dumps(answers))
