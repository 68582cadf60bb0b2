"""How fast gradients get into a bucket, on a GPU.

    python benchmarks/bucket_copy.py [--device cpu --scale 0.001]

For the gradients of a transformer of 1.1 billion parameters, and for 4000 small tensors, with and
without a cast: `copy_` for each tensor, `torch._foreach_copy_`, `zerofix.kernels.pack` in each of
its ways, and `Pending` as gradient hooks use it. All ways fill the bucket with the same bits, or
nothing is measured. The bandwidth counts bytes read and written, and its share is that of one
large `copy_` on the same device. Writes benchmarks/results/bucket_copy.json.

`--device cpu` tries the script out: nothing is written then.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import zerofix.kernels.pack as packing
from zerofix.kernels.pack import pack
from zerofix.kernels.pending import BOUND, Pending

ROUNDS = 7
CASTS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)
GOALS = {
    "share of copy bandwidth, transformer": 0.9,
    "times as fast as copy_, small": 2.0,
    "times as fast as _foreach_copy_, small": 1.0,
}


def transformer(scale: float) -> list[int]:
    """Elements of each gradient of a Llama with 1.1 billion parameters, last layer first."""
    hidden, feed_forward, vocabulary, layers = 2048, 8192, 32000, 16
    key_value = hidden // 4
    layer = [hidden * feed_forward] * 3 + [hidden * hidden, hidden * key_value]
    layer += [hidden * key_value, hidden * hidden, hidden, hidden]
    sizes = [vocabulary * hidden, hidden, *layer * layers, vocabulary * hidden]
    return [max(1, round(size * scale)) for size in sizes]


def small(scale: float) -> list[int]:
    """4000 biases and norms of 1 to 8192 elements, of any alignment."""
    draw = random.Random(0)
    return [round(2 ** draw.uniform(0, 13)) for _ in range(max(1, round(4000 * scale)))]


class Device:
    """Waits for and names a GPU, or a CPU in its place."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gpu = name != "cpu"

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def describe(self) -> dict[str, object]:
        if not self.gpu:
            return {"gpu": None}
        properties = torch.cuda.get_device_properties(0)
        return {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda or torch.version.hip,
        }

    def seconds(self, work: Callable[[], None]) -> tuple[float, float]:
        """Of one run among many in a row, and of the host's part in it: medians."""
        work()
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        repeats = max(1, min(50, round(0.1 / (time.perf_counter() - start))))
        whole, host = [], []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            work()
            host.append(time.perf_counter() - start)
            self.wait()
            start = time.perf_counter()
            for _ in range(repeats):
                work()
            self.wait()
            whole.append((time.perf_counter() - start) / repeats)
        return statistics.median(whole), statistics.median(host)


class InOneWay:
    """`pack` with ZEROFIX_BUCKET_COPY set."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __call__(self, sources: list[Tensor], destinations: list[Tensor]) -> None:
        os.environ["ZEROFIX_BUCKET_COPY"] = self.way
        pack(sources, destinations)


def copy_each(sources: list[Tensor], destinations: list[Tensor]) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        destination.copy_(source)


def copy_from_hooks(sources: list[Tensor], destinations: list[Tensor]) -> None:
    # What waits under this setting alone, and where the kernel can run.
    os.environ["ZEROFIX_BUCKET_COPY"] = "triton" if sources[0].is_cuda else "torch"
    pending = Pending()
    for source, destination in zip(sources, destinations, strict=True):
        if source.nbytes >= BOUND:
            destination.copy_(source)
            continue
        # Only the last argument becomes a view of the bucket.
        pending.add(source, destination, source.detach())
        pending.give_back()
        if pending.bytes >= BOUND:
            pending.launch()
    if pending:
        pending.launch()


Way = Callable[[list[Tensor], list[Tensor]], None]


def ways(device: Device) -> dict[str, Way]:
    found: dict[str, Way] = {
        "copy_": copy_each,
        "_foreach_copy_": lambda sources, slices: torch._foreach_copy_(slices, sources),
        "pack torch": InOneWay("torch"),
        "pack auto": InOneWay("auto"),
        "pending": copy_from_hooks,
    }
    if device.gpu:
        found["pack triton"] = InOneWay("triton")
    return found


def copy_bandwidth(device: Device, scale: float) -> float:
    """GB/s, read and written, of one large copy."""
    source = torch.empty(max(1, round(2**31 * scale)), dtype=torch.uint8, device=device.name)
    source.random_()
    destination = torch.empty_like(source)
    whole, _ = device.seconds(lambda: destination.copy_(source))
    return 2 * source.nbytes / whole / 1e9


def measure(
    device: Device, sizes: list[int], source: torch.dtype, destination: torch.dtype
) -> dict[str, dict[str, float]]:
    """Way to its figures."""
    generator = torch.Generator(device.name).manual_seed(0)
    gradients = [
        torch.randn(size, dtype=source, device=device.name, generator=generator) for size in sizes
    ]
    bucket = torch.empty(sum(sizes), dtype=destination, device=device.name)
    slices = list(bucket.split(sizes))
    moved = sum(sizes) * (source.itemsize + destination.itemsize)
    expected = torch.cat(gradients).to(destination)
    figures = {}
    for name, way in ways(device).items():
        bucket.fill_(float("nan"))
        way(gradients, slices)
        if not torch.equal(bucket, expected):
            raise SystemExit(f"{name} copied something else from {source} to {destination}")
        whole, host = device.seconds(partial(way, gradients, slices))
        figures[name] = {
            "us": round(1e6 * whole, 1),
            "host_us": round(1e6 * host, 1),
            "GB/s": round(moved / whole / 1e9, 1),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="of the lists, to try it out")
    arguments = parser.parse_args()
    device = Device(arguments.device)
    if device.gpu and not torch.cuda.is_available():
        sys.exit("bucket_copy needs a GPU that torch.cuda knows; --device cpu tries it out")

    lists = {"transformer": transformer(arguments.scale), "small": small(arguments.scale)}
    copy = copy_bandwidth(device, arguments.scale)
    print(f"one large copy: {copy:.0f} GB/s")
    figures = []
    for name, sizes in lists.items():
        for source, destination in CASTS:
            by_way = measure(device, sizes, source, destination)
            cast = f"{source} -> {destination}".replace("torch.", "")
            for way, figure in by_way.items():
                figure["share"] = round(figure["GB/s"] / copy, 3)
                figure["speedup_to_copy_"] = round(by_way["copy_"]["us"] / figure["us"], 2)
                print(f"{name:12} {cast:20} {way:15} {figure}")
            figures.append(
                {"list": name, "tensors": len(sizes), "elements": sum(sizes), "cast": cast}
                | {"ways": by_way}
            )

    same = {f["list"]: f["ways"] for f in figures if f["cast"] == "bfloat16 -> bfloat16"}
    reached = {
        "share of copy bandwidth, transformer": same["transformer"]["pack auto"]["share"],
        "times as fast as copy_, small": same["small"]["pack auto"]["speedup_to_copy_"],
        "times as fast as _foreach_copy_, small": round(
            same["small"]["_foreach_copy_"]["us"] / same["small"]["pack auto"]["us"], 2
        ),
    }
    for goal, wanted in GOALS.items():
        verdict = "reached" if reached[goal] >= wanted else "MISSED"
        print(f"{goal}: {reached[goal]}, goal {wanted}: {verdict}")
    if not device.gpu:
        print("tried out on a CPU: nothing is written")
        return
    from results import write

    decisions = [[*map(str, kind), wins] for kind, wins in packing._triton_wins.items()]
    write(
        "bucket_copy",
        device.describe()
        | {"copy_GB/s": round(copy, 1), "pending_bound_bytes": BOUND, "rounds": ROUNDS}
        | {"goals": GOALS, "reached": reached, "figures": figures, "triton_wins": decisions},
    )


if __name__ == "__main__":
    main()
