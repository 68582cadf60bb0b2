"""What `import zerofix` does to the installed release, in processes of their own."""

import importlib.util
import json
import re
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version
from processes import ROOT, TELL, answer, python

from zerofix.gate import State
from zerofix.patches import CATALOGUE

sys.path.append(str(ROOT / "tools"))
import make_releases

RELEASE = metadata.version("deepspeed")
TABLE = json.loads(make_releases.OUTPUT.read_text())


def expected_states():
    """Fix name to the state it must have on this release, by the range its record names."""
    states = {}
    for fix in CATALOGUE:
        if make_releases.verdict(fix, [RELEASE]) == "wrong":
            state = State.APPLIED
        elif fix.introduced and Version(RELEASE) < Version(fix.introduced):
            state = State.NOT_AFFECTED
        else:
            state = State.FIXED_UPSTREAM
        states[fix.name] = state.value
    return states


# `import deepspeed` leaves out some modules; what they need is settled when they come.
IMPORT_ALL = f"""
import contextlib, importlib
for module in {sorted({target.module for fix in CATALOGUE for target in fix.targets})}:
    with contextlib.suppress(ModuleNotFoundError):  # not every release has it
        importlib.import_module(module)
"""

IMPORT_ORDERS = {
    "before": "import zerofix, deepspeed, zerofix",
    "after, by a module of it": "import deepspeed.runtime.zero.stage_1_and_2, zerofix",
    "threads": """
import threading
import zerofix
threads = [threading.Thread(target=__import__, args=("deepspeed",)) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
""",
    "half imported": """
import sys, threading, time
thread = threading.Thread(target=__import__, args=("deepspeed",))
thread.start()
while "deepspeed.runtime" not in sys.modules: time.sleep(0.001)
assert sys.modules["deepspeed"].__spec__._initializing
import zerofix
assert {f.state.value for f in zerofix.status().fixes} == {"pending"}
thread.join()
""",
}


@pytest.mark.parametrize("order", IMPORT_ORDERS)
def test_every_import_order_applies_what_the_release_needs(order):
    done = python(IMPORT_ORDERS[order] + TELL + IMPORT_ALL + TELL)
    assert done.returncode == 0, done.stderr
    told, later = map(json.loads, done.stdout.splitlines()[-2:])
    assert later["states"] == expected_states()
    pending = {name for name, state in told["states"].items() if state == "pending"}
    assert pending <= {"superoffload", "superoffload_step"}
    assert told["states"] == expected_states() | dict.fromkeys(pending, "pending")
    assert told["edited"] == (told["states"]["copy_grads"] == "applied")
    assert told["deepspeed"] == RELEASE
    assert told["ok"]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("zerofix")]
    applied = [name for name, state in told["states"].items() if state == "applied"]
    said = f"{len(applied)} fix(es)? applied \\({', '.join(applied)}\\)" if applied else "no fix"
    assert re.match(rf"zerofix \S+: DeepSpeed {re.escape(RELEASE)}: {said}", line)


def test_reverting_puts_back_the_same_objects_and_applying_brings_all_again():
    told = answer(
        IMPORT_ALL
        + """
import json, pickle, sys, types
import deepspeed
modules = [m for name, m in sys.modules.items() if name.startswith("deepspeed.")]
classes = {c for m in modules for c in vars(m).values() if isinstance(c, type)}
stock = [(c, k, v) for c in classes for k, v in list(vars(c).items())]
def changed(): return {k for c, k, v in stock if vars(c).get(k) is not v}
def pickles(f):
    try: return pickle.loads(pickle.dumps(f)) is f
    except (AttributeError, pickle.PicklingError): return False
# Private and some decorated functions cannot be pickled by their names.
could = [(c, k) for c, k, v in stock if isinstance(v, types.FunctionType) and pickles(v)]
import zerofix
first = changed()
assert [(c, k) for c, k in could if not pickles(getattr(c, k))] == []
states = {f.state.value for f in zerofix.revert().fixes}
reverted = changed()
zerofix.revert()
again = {f.name: zerofix.apply(f.name).state.value for f in zerofix.status().fixes}
changes = [sorted(first), sorted(reverted), sorted(changed())]
print(json.dumps([*changes, sorted(states), again]))
""",
    )
    first, reverted, last, states, again = told
    targets = {
        target.path.rpartition(".")[2]
        for fix in CATALOGUE
        if expected_states()[fix.name] == "applied"
        for target in fix.targets
    }
    for changed in (first, last):
        assert {re.sub("^_[A-Za-z]\\w*?(?=__)", "", name) for name in changed} == targets
    assert reverted == []
    assert states == ["disabled"]
    assert again == expected_states()


def test_torch_compile_honours_an_edit():
    told = answer(
        """
        import zerofix, deepspeed, json, torch
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Z
        class Optimizer:
            reset_cpu_buffers = Z.reset_cpu_buffers
            def _wait_for_offload_copies(self): pass
        optimizer = Optimizer()
        @torch.compile(backend="eager", fullgraph=True)
        def step(x):
            optimizer.reset_cpu_buffers()
            return x + 1
        step(torch.ones(1))
        print(json.dumps(hasattr(optimizer, "partial_sums_in_cpu")))
        """
    )
    assert told == (expected_states()["copy_grads"] == "applied")


def test_a_function_below_deepspeeds_own_decorator_can_be_edited():
    """instrument_w_nvtx hides what it decorates: no __wrapped__, another name."""
    told = answer(
        """
        import json
        from deepspeed.runtime.zero import stage3
        from zerofix.edits import build
        from zerofix.fix import Edit
        from zerofix.source import locate
        name = "DeepSpeedZeroOptimizer_Stage3._partition_all_parameters"
        site = locate(f"{stage3.__name__}:{name}", stage3)
        call = "self.parameter_offload.partition_all_parameters()"
        built = build(site, [Edit(call, "self.append(1)")])
        calls = []
        built(calls)
        same = built.__code__ is site.attribute.__code__
        print(json.dumps([site.function is site.attribute, same, calls]))
        """
    )
    assert told == [False, True, [1]]


def test_the_table_of_releases_has_the_bodies_that_are_installed(tmp_path):
    """The tool that makes the table, run on the installed files."""
    root = Path(importlib.util.find_spec("deepspeed").submodule_search_locations[0])
    sdist = tmp_path / "deepspeed.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for module in {t.module for fix in CATALOGUE for t in fix.targets}:
            file = root.parent / (module.replace(".", "/") + ".py")
            if file.exists():
                archive.add(file, Path("sdist") / file.relative_to(root.parent))
    trees = make_releases.python_files(sdist)
    for path, found in TABLE["targets"].items():
        assert RELEASE in found[make_releases.body(path, trees)]
