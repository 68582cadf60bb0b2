"""What goes wrong around zerofix leaves DeepSpeed whole: as it was, or repaired."""

import importlib.util
import json
import py_compile
import time
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version
from processes import TELL, answer, python

from zerofix.patches import CATALOGUE

pytestmark = pytest.mark.skipif(
    Version(metadata.version("deepspeed")) >= Version("0.19.0"), reason="needs no copy_grads"
)
DEEPSPEED = Path(importlib.util.find_spec("deepspeed").submodule_search_locations[0])
TARGETS = {t.module for fix in CATALOGUE for t in fix.targets}
FILES = {file for m in TARGETS if (file := DEEPSPEED.parent / f"{m.replace('.', '/')}.py").exists()}

# A copy_grads of which one can see how much is there: none, part or all of its functions.
SEEN = """
import json, os, sys, threading, time
import deepspeed, zerofix
from zerofix.patches import copy_grads
from zerofix.source import owner_of
sites = [(owner_of(t.path, sys.modules[t.module]), t.path.rpartition(".")[2])
         for t in copy_grads.FIX.targets]
zerofix.revert()
stock = [vars(owner)[name] for owner, name in sites]
def changed(): return sum(vars(o)[n] is not s for (o, n), s in zip(sites, stock))
"""


def test_threads_that_apply_and_revert_leave_all_or_nothing():
    told = answer(
        SEEN
        + """
sys.setswitchinterval(1e-5)
errors = []
def work(number):
    try:
        for turn in range(6):
            if (number + turn) % 3: zerofix.apply("copy_grads")
            else: zerofix.revert()
    except Exception as error: errors.append(repr(error))
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
after = changed()
zerofix.revert(); reverted = changed()
zerofix.apply("copy_grads"); applied = changed()
print(json.dumps([errors, after in (0, len(sites)), reverted, applied == len(sites)]))
"""
    )
    assert told == [[], True, 0, True]


def test_a_fork_while_fixes_are_applied_has_all_of_them_and_goes_on():
    """The child has no thread that could finish, or give back the lock."""
    told = answer(
        SEEN
        + """
from zerofix.install import Patcher
put, writing = Patcher._put, threading.Event()
def slowly(self, *arguments):
    put(self, *arguments)
    writing.set()
    time.sleep(0.1)
Patcher._put = slowly
thread = threading.Thread(target=zerofix.apply, args=("copy_grads",))
thread.start()
writing.wait()
Patcher._put = put
read, write = os.pipe()
child = os.fork()
if child == 0:
    import signal
    signal.alarm(20)
    whole = [changed(), zerofix.status()["copy_grads"].state.value, zerofix.revert().ok, changed()]
    os.write(write, json.dumps(whole).encode())
    os._exit(0)
os.close(write)
thread.join()
told = os.read(read, 1000).decode()
os.waitpid(child, 0)
print(json.dumps([json.loads(told or "null"), len(sites), changed()]))
"""
    )
    in_child, targets, in_parent = told
    assert in_child == [targets, "applied", True, 0]
    assert in_parent == targets


def test_a_read_only_installation_is_repaired_and_nothing_is_written():
    """Every attempt to write there fails, as on a read-only file system, and is noted."""
    told = answer(
        """
import sys
places = ("site-packages", "deepspeed", "zerofix")
tried = []
def read_only(event, arguments):
    writes = event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.chmod")
    if event == "open" and isinstance(arguments[0], str):
        writes = bool(arguments[2] & 3)  # O_WRONLY, O_RDWR
    if writes and any(f"/{place}/" in str(arguments[0]) for place in places):
        tried.append(str(arguments[0]))
        raise OSError(30, "Read-only file system", arguments[0])
sys.addaudithook(read_only)
import zerofix, deepspeed
"""
        + TELL.replace('"ok":', '"tried": [t for t in tried if "__pycache__" not in t], "ok":')
    )
    assert told["states"]["copy_grads"] == "applied"
    assert told["edited"]
    assert told["ok"]
    assert told["tried"] == []


def test_a_reload_of_a_deepspeed_module_is_repaired_again():
    told = answer(
        "import zerofix, deepspeed, importlib\n"
        "from deepspeed.runtime.zero import stage_1_and_2\n"
        "before = stage_1_and_2.DeepSpeedZeroOptimizer\n"
        "importlib.reload(stage_1_and_2)\n"
        "assert stage_1_and_2.DeepSpeedZeroOptimizer is not before\n" + TELL
    )
    assert told["states"]["copy_grads"] == "applied"
    assert told["edited"]
    assert told["ok"]


def mirror(copy, source=DEEPSPEED):
    """The installed DeepSpeed by links, but for the folders and files of the targets."""
    copy.mkdir()
    for entry in source.iterdir():
        if any(entry in file.parents for file in FILES):
            mirror(copy / entry.name, entry)
        elif entry not in FILES and entry.name != "__pycache__":
            (copy / entry.name).symlink_to(entry)


def test_a_deepspeed_that_is_compiled_only_is_left_alone_and_said(tmp_path):
    mirror(tmp_path / "deepspeed")
    for file in FILES:
        compiled = tmp_path / file.relative_to(DEEPSPEED.parent).with_suffix(".pyc")
        py_compile.compile(str(file), cfile=str(compiled), doraise=True)
    done = python("import zerofix, deepspeed" + TELL, path=tmp_path)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["states"]["copy_grads"] == "unrecognised"
    assert not told["edited"]
    assert not told["ok"]
    said = "copy_grads is NOT applied (unrecognised): deepspeed.runtime.zero.stage_1_and_2 comes "
    assert f"{said}without source ({tmp_path}/deepspeed/runtime/zero/stage_1_and_2.pyc)" in (
        done.stderr
    )


def test_a_zipped_deepspeed_is_repaired_as_its_source_is_there(tmp_path):
    """The rest goes in compiled, where it has been: that spares compiling it again."""
    with zipfile.ZipFile(tmp_path / "deepspeed.zip", "w") as archive:
        for file in DEEPSPEED.rglob("*"):
            if file.is_dir() or "csrc" in file.parts or "__pycache__" in file.parts:
                continue
            date = time.localtime(max(file.stat().st_mtime, 315619200))[:6]
            name = str(file.relative_to(DEEPSPEED.parent))
            archive.writestr(zipfile.ZipInfo(name, date), file.read_bytes())
            if file.suffix == ".py" and file not in FILES:
                compiled = Path(importlib.util.cache_from_source(str(file)))
                if compiled.exists():
                    archive.writestr(zipfile.ZipInfo(f"{name}c", date), compiled.read_bytes())
    told = answer(
        "import zerofix, deepspeed\nassert '.zip/' in deepspeed.__file__" + TELL,
        path=tmp_path / "deepspeed.zip",
    )
    assert told["states"]["copy_grads"] == "applied"
    assert told["edited"]
    assert told["ok"]
