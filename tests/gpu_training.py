"""Trains on one GPU with one layer's gradients late and on a stream of their own.

    python tests/gpu_training.py '{"stage": 2, "compiled": false}'

Prints as JSON the largest difference of a weight to the same training on one stream. Stock
DeepSpeed reduces the bucket before the late gradients are in it, every time: the stream sleeps.
Without a GPU there are no streams, and the difference is 0.
"""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

SLEEP = 200_000_000
"""Cycles: a tenth of a second on a GPU of today."""
STEPS = 3


def train(stage: int, compiled: bool, *, streams: bool) -> list[Any]:
    import deepspeed
    import torch

    gpu = torch.cuda.is_available()
    side = torch.cuda.Stream() if gpu and streams else None

    def on_side() -> AbstractContextManager[Any]:
        return torch.cuda.stream(side) if side is not None else nullcontext()

    def join(late: bool) -> None:
        """Order the streams, as a right program does around work on another one."""
        if side is not None:
            first, then = (torch.cuda.current_stream(), side)[:: -1 if late else 1]
            then.wait_stream(first)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
            self.side = torch.nn.Linear(64, 64)

        def forward(self, x: Any) -> Any:
            y = x
            for layer in self.main:
                y = torch.tanh(layer(y))
            join(late=False)
            # Last in the forward and so first in backward: its copies come before a bucket is full.
            with on_side():
                z = self.side(x)
            if side is not None:
                x.record_stream(side)
                z.record_stream(torch.cuda.current_stream())
            join(late=True)
            return (y + z).square().mean()

    torch.manual_seed(0)
    model = Model()
    for layer in (*model.main, model.side) if compiled else ():
        layer.compile()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_bucket_size": 9000,
                "allgather_bucket_size": 9000,
            },
        },
    )

    def late(gradient: Any) -> None:
        if side is not None:
            torch.cuda._sleep(SLEEP)

    for parameter in model.side.parameters():
        parameter.register_hook(late)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(8, 64, generator=generator).to(engine.device)))
        engine.step()
    weights = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    engine.destroy()
    return weights


def main() -> None:
    import zerofix  # noqa: F401, I001
    import torch
    from zerofix.repro._training import join_world_of_one

    join_world_of_one()
    layout = json.loads(sys.argv[1])
    expected, found = (train(**layout, streams=streams) for streams in (False, True))
    errors = [(a - b).abs().max() for a, b in zip(found, expected, strict=True)]
    print(json.dumps(float(torch.stack(errors).nan_to_num(float("inf")).max())))


if __name__ == "__main__":
    main()
