"""torch_autocast in float16 lowers its scale after an overflow, and then trains."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version
from processes import answer

INSTALLED = Version(version("deepspeed"))
pytestmark = pytest.mark.skipif(
    Version("0.17.6") > INSTALLED, reason="torch_autocast is not there, or ZeRO-3 has it otherwise"
)

PROGRAM = """
import json, os, zerofix, torch, deepspeed
from deepspeed.utils import safe_get_full_fp32_param
from zerofix.repro import autocast_scaler as repro
from zerofix.repro._training import join_world_of_one, quiet

join_world_of_one()
torch.manual_seed(0)
plain, scaler = repro._model(), torch.amp.GradScaler("cpu")
optimizer = repro._optimizer(plain)
scales = []
for step in range(16):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = repro._loss(plain, step, "cpu")
    scaler.scale(loss).backward()
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    scales.append(scaler.get_scale())
told = {"plain": scales}
with quiet():  # the answer is the last line of stdout
    for stage in (1, 2, 3):
        model = repro._model()
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=repro._optimizer(model), config={
                "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0,
                "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
                "torch_autocast": {"enabled": True, "dtype": "float16"}})
        scales = []
        for step in range(16):
            engine.backward(repro._loss(engine, step, "cpu")); engine.step()
            scales.append(engine.optimizer.torch_autocast_gradscaler.get_scale())
        weight = safe_get_full_fp32_param(model.weight)
        told[stage] = {"scales": scales, "error": (weight - plain.weight).abs().max().item()}
print(json.dumps(told), flush=True)
os._exit(0)  # some releases log at exit, to stdout
"""


@pytest.fixture(scope="module", params=[False, True], ids=["stock", "patched"])
def told(request: pytest.FixtureRequest) -> dict[str, object]:
    variables = {} if request.param else {"ZEROFIX": "0"}
    return {"patched": request.param} | answer(PROGRAM, **variables)


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_the_scale_and_the_weights_are_those_of_torch_amp(stage: str, told: dict) -> None:
    if told["patched"] or Version("0.19.8") > INSTALLED:
        assert told[stage]["scales"] == told["plain"]
        assert told[stage]["error"] <= 1e-6
    else:
        assert set(told[stage]["scales"]) == {65536.0}
        assert told[stage]["error"] > 1e-4
