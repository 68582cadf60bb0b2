"""The worker process of SuperOffload: its faults, its end, the memory it needs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from processes import environment

RELEASE = Version(version("deepspeed"))
FIX = "superoffload" if Version("0.18.9") > RELEASE else "superoffload_step"

pytestmark = pytest.mark.skipif(Version("0.18.0") > RELEASE, reason="it has no SuperOffload")

# A script without a __main__ guard, as users write it. Each engine has one worker: the first a
# process that starts anew, the others forks, whose end is the same.
SCRIPT = """
import functools, gc, json, os, signal, sys, threading, time
import cpuinfo
# It runs a program of its own, for each optimizer.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
import zerofix
import torch, deepspeed
from deepspeed.utils import logger
from superoffload import (
    Scenario, build_model, build_optimizer, configuration, fork_workers, prepare_accelerator
)

torch.set_num_threads(1)
# Each engine collects garbage several times: without this over all that is imported.
gc.freeze()
prepare_accelerator()
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
scenario = Scenario(groups=2)
told = {}

def start():
    model = build_model(scenario)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(scenario, model),
        config=configuration(scenario, super_offload=True),
    )
    step(engine)
    return engine, engine.optimizer.superoffload_cpu_optimizer

def step(engine):
    engine.backward(engine(torch.ones(4, 12, dtype=torch.bfloat16), True))
    engine.step()

def outcome(engine):
    begin = time.monotonic()
    try:
        step(engine)
    except Exception as error:
        return time.monotonic() - begin, f"{type(error).__name__}: {error}"
    return time.monotonic() - begin, "went on"

# One that is slow, then killed.
engine, speculation = start()
told["mode"] = zerofix.status()[FIX].modes
os.kill(speculation._client.pid, signal.SIGSTOP)
threading.Timer(2, os.kill, (speculation._client.pid, signal.SIGCONT)).start()
told["slow"] = outcome(engine)
os.kill(speculation._client.pid, signal.SIGKILL)
told["killed"] = outcome(engine)
engine.destroy()
told["destroyed"] = zerofix.status()[FIX].modes

# One that fails.
fork_workers()
engine, speculation = start()
engine.optimizer.optimizer.param_groups[0]["lr"] = "fast"
told["failed"] = outcome(engine)
engine.destroy()

# One on ten cores, without the fix for a while.
everything = set(range(10))
now = dict.fromkeys([0, os.getpid()], everything)
os.sched_getaffinity = lambda who: now.get(who, everything)
def set_affinity(who, cores):
    now.update(dict.fromkeys([0, os.getpid()] if who in (0, os.getpid()) else [who], set(cores)))
os.sched_setaffinity = set_affinity

engine, speculation = start()
pid = speculation._client.pid
told["cores"] = [sorted(now[0]), sorted(now[pid])]
zerofix.revert()
zerofix.apply(FIX)
told["applied again"] = outcome(engine)
zerofix.revert()
told["reverted"] = outcome(engine)
zerofix.apply(FIX)
before = [weights.clone() for weights in engine.optimizer.fp32_partitioned_groups_flat]
engine.destroy()
try:
    os.kill(pid, 0)
    told["ended"] = False
except ProcessLookupError:
    told["ended"] = True
told["cores after"] = sorted(now[0])
told["weights"] = all(map(torch.equal, before, engine.optimizer.fp32_partitioned_groups_flat))

# One that may not have its cores.
def forbid(who, cores):
    raise PermissionError
os.sched_setaffinity = forbid
engine, speculation = start()
told["forbidden"] = outcome(engine)
engine.destroy()

# One without the memory.
from zerofix.superoffload import speculation as module
available, module.available = module.available, lambda: 1000
said = []
logger.addFilter(lambda record: said.append(record.getMessage()) or True)
engine, speculation = start()
told["obstacle"] = speculation.obstacle
told["said"] = [text for text in said if "zerofix" in text]
told["mode without"] = zerofix.status()[FIX].modes
told["worker"] = hasattr(speculation, "_client")
told["without"] = outcome(engine)
engine.destroy()
module.available = available

# One that is left behind, by a process that ends early.
engine, speculation = start()
told["left"] = speculation._client.pid
print(json.dumps(told), flush=True)
os._exit(0)
"""


@cache
def told() -> dict[str, Any]:
    """What the script saw."""
    tests = Path(__file__).parent.parent
    # As a file: from one, multiprocessing would import it again.
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(f"import sys; sys.path[:0] = [{str(tests)!r}]; FIX = {FIX!r}\n" + SCRIPT)
        done = subprocess.run(
            [sys.executable, str(script)],
            env=environment(None, ZEROFIX_LOG="quiet", OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_a_killed_worker_is_noticed_at_once_with_its_exit_code() -> None:
    seconds, error = told()["killed"]
    assert seconds < 1
    assert error.startswith("RuntimeError: the worker process of SuperOffload")
    assert "ended with exit code -9" in error


def test_an_exception_in_the_worker_is_told() -> None:
    seconds, error = told()["failed"]
    assert seconds < 1
    assert error.startswith("RuntimeError: the worker process of SuperOffload")
    assert "TypeError" in error


def test_a_slow_worker_is_waited_for() -> None:
    seconds, error = told()["slow"]
    assert seconds > 1
    assert error == "went on"


def test_destroy_ends_the_worker_and_gives_the_cores_back() -> None:
    assert told()["cores"] == [[0], list(range(1, 10))]
    assert told()["ended"]
    assert told()["cores after"] == list(range(10))
    assert told()["weights"]


def test_cores_that_may_not_be_had_are_no_error() -> None:
    assert told()["forbidden"][1] == "went on"


def test_the_worker_ends_with_the_training_process() -> None:
    worker = Path("/proc", str(told()["left"]))
    end = time.monotonic() + 10
    while worker.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not worker.exists()


def test_without_the_memory_it_steps_as_plain_offload_and_says_so() -> None:
    assert told()["obstacle"].startswith("it needs 0.0 GiB of host memory")
    (said,) = told()["said"]
    assert said == f"zerofix: SuperOffload steps as plain offload does: {told()['obstacle']}"
    assert not told()["worker"]
    assert told()["without"][1] == "went on"


def test_status_says_how_an_engine_steps() -> None:
    (mode,) = told()["mode"]
    assert mode.startswith("SuperOffload steps during the backward, into 0.00 GiB of host memory")
    (mode,) = told()["mode without"]
    assert mode == f"SuperOffload steps as plain offload does: {told()['obstacle']}"
    (mode,) = told()["destroyed"]
    assert mode.startswith("SuperOffload would step during the backward with up to ")


def test_an_engine_made_with_the_fix_does_not_train_on_in_silence_without_it() -> None:
    assert told()["reverted"][1].startswith(("AttributeError", "KeyError"))
    if FIX == "superoffload_step":
        assert "apply it again, or make a new engine" in told()["reverted"][1]
    assert told()["applied again"][1] == "went on"
