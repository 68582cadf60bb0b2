"""Runs a backward under engine.no_sync() with ZeRO-1 and overlap_comm, and one after it."""

import torch

MEASURES = "backwards after no_sync that end in an assertion, ZeRO-1 with overlap_comm"
TOLERANCE = 0.0


def run() -> float:
    """1 where it does, 0 where not."""
    from zerofix.repro._training import join_world_of_one, quiet

    with quiet():
        join_world_of_one()
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        model = torch.nn.Linear(8, 4)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
            config={
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": 1, "overlap_comm": True},
                "zero_allow_untested_optimizer": True,
            },
        )
        batch = torch.ones(4, 8, device=get_accelerator().current_device_name())
        with engine.no_sync():
            engine.backward(engine(batch).sum())
        try:
            engine.backward(engine(batch).sum())
        except AssertionError as error:
            if "already been reduced" not in str(error):
                raise
            return 1.0
        engine.step()
    return 0.0
