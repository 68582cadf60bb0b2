"""A training step with some fixes against the same step on stock DeepSpeed.

    python benchmarks/steps.py copy_grads|absent_grads [--blocks N]
    torchrun --nproc_per_node 2 benchmarks/steps.py reduction_order --samples 512 [--blocks N]

One engine a configuration: blocks of steps alternate between stock and patched (`zerofix.revert`,
`zerofix.apply`), and the ratio is the median of those of neighbouring blocks. One process, or one a
rank. Every parameter has its gradient. Writes benchmarks/results/NAME.json.
"""

import argparse
import os
import statistics
import time

import zerofix

STEPS = 5
MEASURED = {
    "copy_grads": (["copy_grads"], [(1, True), (2, True)]),
    "absent_grads": (
        ["absent_grads", "absent_grads_zero3"],
        [(1, True), (2, True), (3, False), (3, True)],
    ),
    "reduction_order": (
        ["absent_grads", "reduction_order"],
        [(1, False), (2, False), (2, True)],
    ),
}
"""Name to the fixes, and the stages with and without offload."""


def engine(stage: int, offload: bool, accumulation: int):
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    made, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.0,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
        },
    )
    return made


def seconds(made, accumulation: int, samples: int) -> float:
    import torch

    batch = torch.ones(samples, 512, device=made.device)
    start = time.perf_counter()
    for _ in range(STEPS * accumulation):
        made.backward(made(batch).sum())
        made.step()
    return (time.perf_counter() - start) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=MEASURED)
    parser.add_argument("--blocks", type=int, default=25)
    parser.add_argument("--samples", type=int, default=4, help="in a micro-batch of a rank")
    options = parser.parse_args()
    fixes, stages = MEASURED[options.name]

    from results import write

    from zerofix.repro._training import join_world_of_one

    if "RANK" in os.environ:
        import deepspeed

        deepspeed.init_distributed()
    else:
        join_world_of_one()

    figures = []
    for stage, offload in stages:
        for accumulation in (1, 4):
            made = engine(stage, offload, accumulation)
            times: dict[str, list[float]] = {"stock": [], "zerofix": []}
            for block in range(2 * options.blocks + 2):
                zerofix.revert()
                for fix in fixes if block % 2 else ():
                    zerofix.apply(fix)
                took = seconds(made, accumulation, options.samples)
                if block >= 2:
                    times["zerofix" if block % 2 else "stock"].append(took)
            pairs = list(zip(times["stock"], times["zerofix"], strict=True))
            stock, patched = (statistics.median(times[kind]) for kind in ("stock", "zerofix"))
            figures.append(
                {
                    "stage": stage,
                    "offload": offload,
                    "gradient_accumulation_steps": accumulation,
                    "stock_ms": round(1e3 * stock, 3),
                    "zerofix_ms": round(1e3 * patched, 3),
                    "ratio": round(statistics.median(b / a for a, b in pairs), 3),
                }
            )
    if os.environ.get("RANK", "0") == "0":
        measured = vars(options) | {"steps_per_block": STEPS, "figures": figures}
        write(options.name, measured)


if __name__ == "__main__":
    main()
