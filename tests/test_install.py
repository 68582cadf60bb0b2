"""What `import zerofix` does to the real DeepSpeed, in processes of their own."""

import importlib.util
import json
import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version
from processes import TELL, answer, python

VERSION = metadata.version("deepspeed")
STAGE_1_AND_2 = "runtime/zero/stage_1_and_2.py"

affected = pytest.mark.skipif(
    Version(VERSION) >= Version("0.19.0"), reason=f"DeepSpeed {VERSION} needs no copy_grads"
)


def test_importing_zerofix_imports_nothing_heavy():
    heavy = answer(
        """
        import sys, json
        import zerofix
        print(json.dumps([m for m in ("torch", "deepspeed", "triton", "numpy", "rich", "click",
                                      "packaging") if m in sys.modules]))
        """
    )
    assert heavy == []


def test_without_deepspeed_it_does_nothing_and_says_so_only_when_asked(tmp_path):
    (tmp_path / "deepspeed.py").write_text("raise ModuleNotFoundError(name='deepspeed')")
    done = python(
        """
        import zerofix
        try: import deepspeed
        except ModuleNotFoundError: pass
        status = zerofix.status()
        states = {f.state.value for f in status.fixes}
        print(status.deepspeed, *sorted(states), zerofix.revert().ok)
        """,
        path=tmp_path,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("None pending True\n", "", 0)
    done = python("from zerofix.cli import main; main(['status'])", path=tmp_path)
    assert done.returncode == 1
    assert "DeepSpeed is not installed in this environment" in done.stderr


@affected
def test_a_spawned_child_that_imports_zerofix_is_repaired_too(tmp_path):
    (tmp_path / "program.py").write_text(
        """
import zerofix
import multiprocessing

def child(queue):
    import deepspeed
    queue.put(zerofix.status()["copy_grads"].state.value)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start(); print(queue.get()); process.join()
"""
    )
    done = python(
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')",
        str(tmp_path / "program.py"),
        path=tmp_path,
    )
    assert done.stdout.splitlines()[-1] == "applied", done.stderr


@affected
def test_debug_says_what_became_of_each_fix():
    done = python("import zerofix, deepspeed", ZEROFIX_LOG="debug")
    assert f"zerofix: copy_grads: applied: DeepSpeed {VERSION} has the defect\n" in done.stderr


def test_ranks_but_the_first_are_silent():
    done = python("import zerofix, deepspeed", RANK="1", LOCAL_RANK="1", ZEROFIX_LOG="debug")
    assert "zerofix" not in done.stderr


@pytest.mark.parametrize("variable", ["ZEROFIX", "ZEROFIX_COPY_GRADS"])
def test_a_toggle_turns_it_off(variable):
    quiet = {"ZEROFIX_LOG": "quiet"}
    done = python("import zerofix, deepspeed" + TELL, **{variable: "0"}, **quiet)
    assert "zerofix" not in done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["states"]["copy_grads"] == "disabled"
    assert told["reasons"]["copy_grads"] == f"{variable}=0"
    assert not told["edited"]
    assert told["ok"]


def test_status_says_when_reduction_order_begins():
    program = """
        import zerofix, deepspeed, json
        fix = zerofix.status()["reduction_order"]
        print(json.dumps([fix.state.value, fix.reason, *fix.modes]))
    """
    waits = "once ranks have differed; with ZEROFIX_REDUCTION_ORDER=1 from the first backward on"
    assert answer(program)[::2] == ["applied", waits]
    ordered = answer(program, ZEROFIX_REDUCTION_ORDER="1")
    assert ordered[::2] == ["applied", "from the first backward on"]
    off = answer(program, ZEROFIX_REDUCTION_ORDER="0")
    assert off == ["disabled", "ZEROFIX_REDUCTION_ORDER=0"]


def test_a_misspelt_toggle_is_an_error_that_suggests_the_right_one():
    done = python("import zerofix", ZEROFIX_COPYGRADS="0")
    assert done.returncode == 1
    assert "ZEROFIX_COPYGRADS is not a setting of zerofix. Did you mean ZEROFIX_COPY_GRADS?" in (
        done.stderr
    )


@affected
def test_a_fix_that_somebody_patches_over_is_a_conflict_and_revert_leaves_it_whole():
    told = answer(
        """
        import zerofix, deepspeed, json
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Z
        ours = dict(vars(Z))
        def theirs(self): pass
        Z.reset_cpu_buffers = theirs
        before = zerofix.status()
        status = zerofix.revert()["copy_grads"]
        told = [before.ok, status.state.value, status.reason,
            vars(Z)["copy_grads_in_partition"] is ours["copy_grads_in_partition"],
            Z.reset_cpu_buffers is theirs]
        Z.reset_cpu_buffers = ours["reset_cpu_buffers"]
        print(json.dumps([*told, zerofix.status()["copy_grads"].state.value]))
        """
    )
    ok, state, reason, kept, theirs, after = told
    assert not ok
    assert state == "conflict"
    assert after == "applied"
    assert "reset_cpu_buffers has been patched over by __main__ (<string>:" in reason
    assert kept
    assert theirs


@affected
@pytest.mark.parametrize(
    "stderr", ["sys.stderr.close()", "sys.stderr = None", "sys.stderr = open('/dev/full', 'w')"]
)
def test_nothing_to_write_to_is_no_reason_to_fail(stderr):
    # Which DeepSpeed imports, and which has something to say where torch is old.
    quiet = {"TRANSFORMERS_VERBOSITY": "critical"}
    done = python(f"import sys; {stderr}\nimport zerofix, deepspeed\n" + TELL, **quiet)
    assert len(done.stdout.splitlines()) == 1
    assert json.loads(done.stdout)["states"]["copy_grads"] == "applied"


@affected
def test_deepspeed_that_is_imported_anew_or_by_somebody_elses_finder_is_repaired():
    told = answer(
        """
import sys
from importlib.machinery import PathFinder
import zerofix, deepspeed
class Finder:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path) if name == "deepspeed" else None
for name in [name for name in sys.modules if name.startswith("deepspeed")]:
    del sys.modules[name]
sys.meta_path.insert(0, Finder())
import deepspeed
"""
        + TELL
    )
    assert told["states"]["copy_grads"] == "applied"
    assert told["reasons"]["copy_grads"] == f"DeepSpeed {VERSION} has the defect"
    assert told["edited"]


@affected
def test_a_reload_of_zerofix_keeps_what_it_knows():
    told = answer(
        "import zerofix, deepspeed, importlib; importlib.reload(zerofix); zerofix.revert()" + TELL
    )
    assert told["states"]["copy_grads"] == "disabled"
    assert not told["edited"]


@affected
def test_a_write_that_fails_half_way_leaves_deepspeed_as_it_was():
    told = answer(
        """
        import deepspeed, json
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Z
        stock = dict(vars(Z))
        import zerofix.install
        put, calls = zerofix.install.Patcher._put, []
        def failing(self, path, *rest):
            calls.append(path)
            if len(calls) == 3: raise MemoryError("none left")
            put(self, path, *rest)
        zerofix.revert()
        zerofix.install.Patcher._put = failing
        try: zerofix.apply("copy_grads")
        except zerofix.NotAppliedError as error: message = str(error)
        print(json.dumps([message, len(calls), all(vars(Z)[k] is stock[k] for k in stock),
                          zerofix.status().ok]))
        """
    )
    message, calls, same, ok = told
    assert message == "copy_grads is not applied (failed): MemoryError: none left"
    assert calls > 3
    assert same
    assert not ok


# DeepSpeeds that are not quite a release: the installed one, with one file changed.


@pytest.fixture
def deepspeed_like(tmp_path):
    """Makes a module path with the installed DeepSpeed, but for a changed file and version."""

    def make(changes=(), version=None):
        installed = Path(importlib.util.find_spec("deepspeed").submodule_search_locations[0])
        texts = {}
        if changes:
            text = (installed / STAGE_1_AND_2).read_text()
            for old, new in changes:
                assert text.count(old) == 1, old
                text = text.replace(old, new)
            texts[STAGE_1_AND_2] = text
        if version:
            text = (installed / "git_version_info_installed.py").read_text()
            texts["git_version_info_installed.py"] = re.sub(
                r"version ?= ?'[^']*'", f"version='{version}'", text, count=1
            )
        root = tmp_path / "deepspeed"
        root.mkdir()
        mirror(installed, root, {Path(name) for name in texts})
        for name, text in texts.items():
            (root / name).write_text(text)
        return tmp_path

    def mirror(source, copy, own):
        for entry in source.iterdir():
            below = {path.relative_to(entry.name) for path in own if path.parts[0] == entry.name}
            if not below:
                (copy / entry.name).symlink_to(entry)
            elif Path() not in below:
                (copy / entry.name).mkdir()
                mirror(entry, copy / entry.name, below)

    return make


BACKPORT = [
    (
        "            if self.gradient_accumulation_steps > 1:\n                self.async_acc",
        "            if self.micro_step_id > 0 or not self.is_gradient_accumulation_boundary:\n"
        "                self.async_acc",
    ),
    (
        "            accumulate_gradients()\n        else:\n            copy_gradients_to_cpu()",
        "            accumulate_gradients()\n        copy_gradients_to_cpu()",
    ),
]
RESET = "        self.norm_for_param_grads = {}\n        self.local_overflow = False\n\n"
UNKNOWN = [(RESET, RESET.replace("False", "0"))]
COMMENT = [(RESET, "        # A vendor's word.\n" + RESET.replace("{}", "{  }"))]


@affected
def test_a_vendor_backport_is_recognised_whatever_the_version_says(deepspeed_like):
    told = answer("import zerofix, deepspeed" + TELL, deepspeed_like(BACKPORT))
    assert told["states"]["copy_grads"] == "fixed-upstream"
    assert not told["edited"]


@affected
def test_a_lying_version_is_said_and_the_fix_applied(deepspeed_like):
    told = answer("import zerofix, deepspeed" + TELL, deepspeed_like(version="0.19.5"))
    assert told["deepspeed"] == "0.19.5"
    assert told["edited"]
    assert "should not have the defect, but" in told["reasons"]["copy_grads"]


@affected
def test_a_local_build_with_other_comments_is_recognised(deepspeed_like):
    path = deepspeed_like(COMMENT, version="0.18.4+abc")
    told = answer("import zerofix, deepspeed" + TELL, path)
    assert told["states"]["copy_grads"] == "applied"
    assert told["deepspeed"] == "0.18.4+abc"


@affected
def test_an_unknown_body_is_left_alone_and_said_once(deepspeed_like):
    path = deepspeed_like(UNKNOWN)
    done = python(
        "import zerofix, deepspeed; import deepspeed.runtime.zero.stage3" + TELL, path=path
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["states"]["copy_grads"] == "unrecognised"
    assert (told["edited"], told["ok"]) == (False, False)
    warnings = [line for line in done.stderr.splitlines() if "NOT applied" in line]
    assert len(warnings) == 1
    assert "no release has this body of DeepSpeedZeroOptimizer.reset_cpu_buffers" in warnings[0]

    strict = python(
        """
        import zerofix
        for _ in range(2):
            try: import deepspeed
            except zerofix.NotAppliedError as error: print(error)
        """,
        path=path,
        ZEROFIX_STRICT="1",
    )
    assert strict.stdout.count("copy_grads is not applied (unrecognised)") == 2, strict.stderr

    forced = answer("import zerofix, deepspeed" + TELL, path, ZEROFIX_COPY_GRADS="force")
    assert forced["states"]["copy_grads"] == "applied"
    assert forced["edited"]


@affected
def test_somebody_elses_patch_is_a_conflict_that_names_them():
    done = python(
        """
import deepspeed
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Z
def theirs(self, param): pass
Z.copy_grads_in_partition = theirs
import zerofix
"""
        + TELL,
        ZEROFIX_COPY_GRADS="force",
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["states"]["copy_grads"] == "conflict"
    assert (
        "copy_grads_in_partition was replaced by __main__ (<string>:"
        in (told["reasons"]["copy_grads"])
    )
    assert not told["edited"]


def test_only_an_override_that_does_not_call_super_is_not_reached():
    told = answer(
        """
        import zerofix, deepspeed, json
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        class Calls(DeepSpeedCPUAdam):
            def __init__(self, *arguments): super().__init__(*arguments)
        class Replaces(DeepSpeedCPUAdam):
            def __init__(self): pass
        print(json.dumps(zerofix.status()["cpu_adam_resume"].not_reached))
        """
    )
    assert told == ["__main__:Replaces.__init__"]


@pytest.mark.skipif(
    not Version("0.17.5") <= Version(VERSION) < Version("0.18.5"),
    reason=f"DeepSpeed {VERSION} needs no bucket_overlap",
)
def test_a_fix_is_not_applied_without_one_that_it_needs():
    program = """
        import zerofix, deepspeed, json
        states = {f.name: f.state.value for f in zerofix.status().fixes}
        zerofix.revert()
        try:
            zerofix.apply("bucket_overlap")
        except zerofix.NotAppliedError as error:
            raised = str(error)
        print(json.dumps([states["average_tensor"], states["bucket_overlap"], raised]))
    """
    lonely = answer(program, ZEROFIX_GRAD_LIFETIME="0")
    assert lonely[:2] == ["applied", "disabled"]
    assert "it needs average_tensor, grad_lifetime, which is not in force" in lonely[2]
    assert answer(program)[:2] == ["applied", "applied"]
