"""Trains a small model by a framework that drives DeepSpeed, and in plain torch.

Each is used as its documentation says, with one and the same configuration of DeepSpeed: ZeRO-2
with the optimizer offloaded, and four micro-batches a step. Each returns a function that trains
and returns the model, before which there is no engine.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 3
ACCUMULATION = 4
MICRO_BATCH = 8
FEATURES = 16
LEARNING_RATE = 1e-2

Train = Callable[[], Any]


def configuration(**sizes: Any) -> dict[str, Any]:
    """What all have in common; the frameworks differ in who sets the sizes."""
    return sizes | {
        "gradient_clipping": 0.0,
        "fp16": {"enabled": False},  # transformers 4 would take nothing for fp16
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        # The optimizer given stays: DeepSpeed's own for CPUs would be compiled first.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


def build_model() -> Any:
    """The same weights in every process, in fp32."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1)
            )

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": nn.functional.mse_loss(self.layers(x), labels)}

    torch.manual_seed(0)
    return Model()


def samples() -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * ACCUMULATION * MICRO_BATCH, FEATURES, generator=generator)
    return [{"x": x, "labels": x.sum(dim=0, keepdim=True)} for x in inputs]


def batches() -> Any:
    """A loader of micro-batches, always in the same order."""
    from torch.utils.data import DataLoader

    return DataLoader(samples(), batch_size=MICRO_BATCH)


def build_optimizer(parameters: Any) -> Any:
    import torch

    # Lightning divides the loss by the number of micro-batches, then DeepSpeed does again, which is
    # Lightning's to repair. Adam does not depend on the scale of gradients.
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)


def plain_torch() -> Any:
    """The measure of right: ``torch.optim`` in fp64."""
    model = build_model().double()
    optimizer = build_optimizer(model.parameters())
    for index, batch in enumerate(batches()):
        loss = model(**{name: tensor.double() for name, tensor in batch.items()})["loss"]
        (loss / ACCUMULATION).backward()
        if (index + 1) % ACCUMULATION == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def trainer(folder: Path) -> Train:
    """``transformers.Trainer``."""
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        """Version 5 has an argument for it, but needs torch 2.6."""

        def get_train_dataloader(self) -> Any:
            data = DataLoader(
                self.train_dataset, batch_size=MICRO_BATCH, collate_fn=self.data_collator
            )
            return self.accelerator.prepare(data)

    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=configuration(**dict.fromkeys(auto, "auto")),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        max_grad_norm=0.0,
        optim="adamw_torch",
        learning_rate=LEARNING_RATE,
        num_train_epochs=1,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    model = build_model()
    trainer = InOrder(model, arguments, train_dataset=samples())

    def train() -> Any:
        trainer.train()
        return model

    return train


def accelerate(folder: Path) -> Train:
    """``accelerate.Accelerator`` and a loop of one's own."""
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(
        hf_ds_config=configuration(
            train_micro_batch_size_per_gpu=MICRO_BATCH, gradient_accumulation_steps=ACCUMULATION
        )
    )
    accelerator = Accelerator(deepspeed_plugin=plugin)

    def train() -> Any:
        model = build_model()
        engine, optimizer, loader = accelerator.prepare(
            model, build_optimizer(model.parameters()), batches()
        )
        for batch in loader:
            with accelerator.accumulate(engine):
                accelerator.backward(engine(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        return model

    return train


def lightning(folder: Path) -> Train:
    """``lightning.Trainer`` with ``DeepSpeedStrategy``."""
    import torch
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class OnCPU(DeepSpeedStrategy):
        """It refuses all devices but CUDA's; that check alone is left out."""

        def setup_environment(self) -> None:
            super(DeepSpeedStrategy, self).setup_environment()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model()

        def training_step(self, batch: Any) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return build_optimizer(self.parameters())

    trainer = Trainer(
        accelerator="cpu",
        # It asks for the devices' indices, and a CPU has none by default.
        strategy=OnCPU(config=configuration(), parallel_devices=[torch.device("cpu", 0)]),
        accumulate_grad_batches=ACCUMULATION,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,  # it shuffles
        default_root_dir=folder,
    )

    def train() -> Any:
        module = Module()
        trainer.fit(module, batches())
        return module.model

    return train


FRAMEWORKS: dict[str, Callable[[Path], Train]] = {
    "Trainer": trainer,
    "Accelerate": accelerate,
    "Lightning": lightning,
}


def worker(folder: Path) -> None:
    """Train by a framework; answers the largest error of a weight, and what zerofix said.

    The request has the framework, and whether zerofix is imported ``first`` or ``last``: just
    before there is an engine. torch is imported in any case.
    """
    framework, place = json.loads((folder / "request.json").read_text())
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "HF_HUB_OFFLINE": "1"}
    said = import_zerofix() if place == "first" else ""
    import deepspeed

    # DeepSpeed would first compile its own collectives for CPUs. Gloo is enough.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # See prepare_accelerator in training.py.
    deepspeed.accelerator.get_accelerator().available_memory = lambda *_: 0
    train = FRAMEWORKS[framework](folder)
    said = said or import_zerofix()
    pairs = zip(train().parameters(), plain_torch().parameters(), strict=True)
    error = max((ours.detach().double() - right).abs().max().item() for ours, right in pairs)
    (folder / "answer.json").write_text(json.dumps([error, said]))


def import_zerofix() -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        import zerofix  # noqa: F401
    return said.getvalue()
