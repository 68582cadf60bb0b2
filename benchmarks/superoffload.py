"""A training step of SuperOffload: stock, with zerofix, and plain offload.

    python benchmarks/superoffload.py [--blocks N] [--width N] [--layers N] [--batch N]

One process, an engine each, blocks of steps in turn; a ratio is the median of those of
neighbouring blocks. On a CPU one thread of the training process stands for the device, and the
optimizer has one thread as well, of the same or of the worker process. Writes
benchmarks/results/superoffload-RELEASE-DEVICE.json. Run it on stock 0.18.9 and on the newest.
"""

import argparse
import os
import statistics
import time
from importlib.metadata import version

import zerofix

STEPS = 2
KINDS = ("plain", "stock", "zerofix")
FIXES = ("superoffload", "superoffload_step")


def engine(kind: str, clipping: float, width: int, layers: int):
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    zerofix.revert()
    if kind == "zerofix":
        for fix in FIXES:
            zerofix.apply(fix)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    made, *_ = deepspeed.initialize(
        model=model,
        # So small that gradients stay too small to be clipped.
        optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-9),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": clipping,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                # A layer each. With the default all gradients would come at the end.
                "reduce_bucket_size": width * width,
                "sub_group_size": width * width,
                "offload_optimizer": {"device": "cpu", "super_offload": kind != "plain"},
            },
        },
    )
    return made


def seconds(made, batch: int, width: int) -> float:
    import torch

    x = torch.ones(batch, width, device=made.device, dtype=torch.bfloat16)
    start = time.perf_counter()
    for _ in range(STEPS):
        made.backward(made(x).float().mean())
        made.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / STEPS


def measure(clipping: float, blocks: int, batch: int, width: int, layers: int) -> dict[str, float]:
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    # The methods of the classes are those of the kind whose turn it is.
    engines = {kind: engine(kind, clipping, width, layers) for kind in KINDS}
    for block in range(blocks + 1):
        for kind, made in engines.items():
            zerofix.revert()
            if kind == "zerofix":
                for fix in FIXES:
                    zerofix.apply(fix)
            took = seconds(made, batch, width)
            if block:
                times[kind].append(took)
    if clipping:
        assert engines["plain"].get_global_grad_norm() < clipping
    for kind, made in engines.items():
        if kind == "stock":
            made.optimizer.superoffload_cpu_optimizer.close()
        made.destroy()
    figures = {f"{kind}_ms": round(1e3 * statistics.median(times[kind]), 1) for kind in KINDS}
    for other in ("plain", "stock"):
        pairs = zip(times[other], times["zerofix"], strict=True)
        figures[f"faster_than_{other}"] = round(statistics.median(a / b for a, b in pairs), 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()

    import torch
    from deepspeed.accelerator import get_accelerator
    from results import write

    from zerofix.repro._training import join_world_of_one

    accelerator = get_accelerator()
    device = accelerator.device_name()
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"  # of the worker
        torch.set_num_threads(1)
        from zerofix.repro import _superoffload

        _superoffload.stand_in()
    join_world_of_one()

    parameters = options.layers * (options.width**2 + options.width)
    figures = [
        {"gradient_clipping": clipping}
        | measure(clipping, options.blocks, options.batch, options.width, options.layers)
        for clipping in (0.0, 1.0)
    ]
    write(
        f"superoffload-{version('deepspeed')}-{device}",
        {
            "parameters": parameters,
            "host_mib_more_than_plain": round(12 * parameters / 2**20, 1),
            "batch": options.batch,
            "blocks": options.blocks,
            "steps_per_block": STEPS,
            "figures": figures,
        },
    )


if __name__ == "__main__":
    main()
