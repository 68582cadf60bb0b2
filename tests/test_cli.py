import io
import json
import re
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from processes import environment

from zerofix import verify
from zerofix.cli import main

RELEASE = metadata.version("deepspeed")


def zerofix(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "zerofix", *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
    )


def test_status_tells_all_there_is_to_know():
    done = zerofix("status", "--json", ZEROFIX_LOG="quiet")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["deepspeed"] == RELEASE
    assert told["deepspeed_path"].endswith("deepspeed")
    assert told["torch"].startswith(metadata.version("torch"))  # which may leave out the +cu130
    assert told["accelerator"] == "cpu"
    assert told["cpu_adam"] in ("jit", "prebuilt")
    assert told["settings"] == {"ZEROFIX_LOG": "quiet"}
    fix = told["fixes"][0]
    assert (fix["name"], fix["state"]) == ("copy_grads", "applied")
    assert fix["links"][0].endswith("/7981")


def test_status_for_people_and_exit_code_when_a_wanted_fix_is_missing():
    program = """
import deepspeed
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Z
def theirs(self): pass
Z.reset_cpu_buffers = theirs
from zerofix.cli import main
main(["status"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "copy_grads  conflict" in done.stdout
    assert "was replaced by __main__ (<string>:" in done.stdout
    assert "settings   none set" in done.stdout
    assert re.search("^CPUAdam    (jit|prebuilt)$", done.stdout, re.MULTILINE)


def test_diff_is_a_patch_of_the_installed_files(tmp_path):
    done = zerofix("diff", "copy_grads")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    patch = tmp_path / "zerofix.patch"
    patch.write_text(done.stdout)
    applied = subprocess.run(
        ["patch", "--dry-run", "-p0", "-d", "/", "-i", str(patch)], capture_output=True, text=True
    )
    assert applied.returncode == 0, applied.stdout
    assert applied.stdout.count("checking file") == 1
    assert "fuzz" not in applied.stdout
    assert "offset" not in applied.stdout


def test_diff_of_a_fix_that_is_off_says_so():
    done = zerofix("diff", "copy_grads", ZEROFIX="0")
    assert done.stdout == ""
    assert "Nothing is changed: copy_grads is disabled." in done.stderr


def test_explain():
    result = CliRunner().invoke(main, ["explain", "grad_accumulation"])
    assert result.exit_code == 0
    for text in ("0.17.6", "0.18.3", "/7509", "ZEROFIX_GRAD_ACCUMULATION=0", "all_grad_tensors"):
        assert text in result.output


@pytest.mark.parametrize("command", ["explain", "diff", "verify"])
def test_an_unknown_fix_is_an_error_that_suggests_the_nearest(command):
    result = CliRunner().invoke(main, [command, "copygrads"])
    assert result.exit_code == 2
    assert "no fix is called 'copygrads'. Did you mean copy_grads?" in result.output


def test_verify_shows_stock_wrong_and_zerofix_right():
    done = zerofix("verify", "copy_grads", "--json", ZEROFIX_COPY_GRADS="0")
    (told,) = json.loads(done.stdout)
    assert done.returncode == 0
    assert told["verdict"] == "repaired"
    assert told["stock"] > 1000 * told["tolerance"]
    assert told["patched"] <= told["tolerance"] <= 2e-6


def run(error=None, state="applied", crash=None):
    if crash:
        return {"crash": crash}
    return {
        "measures": "m",
        "tolerance": 1e-6,
        "error": repr(error),
        "state": state,
        "reason": "because",
        "deepspeed": "1",
    }


@pytest.mark.parametrize(
    ("stock", "patched", "verdict", "ok"),
    [
        (run(1.0), run(0.0), "repaired", True),
        (run(float("nan")), run(0.0), "repaired", True),
        (run(crash="KeyError"), run(0.0), "did not run", False),
        (run(1.0), run(1.0), "still wrong", False),
        (run(1.0), run(float("nan")), "still wrong", False),
        (run(0.0), run(0.0), "not reproduced", False),
        (run(0.0), run(0.0, "fixed-upstream"), "not needed", True),
        (run(1.0), run(1.0, "fixed-upstream"), "wrong, and no fix", False),
        (run(1.0), run(1.0, "conflict"), "not applied", False),
        (run(1.0), run(crash="KeyError"), "did not run", False),
    ],
)
def test_verdicts(stock, patched, verdict, ok):
    judged = verify._judge("copy_grads", stock, patched)
    assert (judged.verdict, judged.ok) == (verdict, ok)
    assert ("KeyError" in judged.detail) == ("crash" in stock or "crash" in patched)


def test_a_program_that_dies_after_its_result_did_not_run():
    for told in ({"code": 9, "output": f"{verify.RESULT}{{}}"}, {"code": 0, "output": "no result"}):
        pipes = {"stdin": io.StringIO(), "stderr": io.StringIO()}
        server = SimpleNamespace(**pipes, stdout=io.StringIO(json.dumps(told)))
        assert "exit code" in verify._run(server, "copy_grads", {})["crash"]


def test_a_reproduction_that_dies_is_told_and_the_next_one_runs():
    with verify._server() as server:
        for _ in range(2):
            assert "No module named" in verify._run(server, "no_such_fix", {})["crash"]
        server.kill()
        server.wait()
        assert "exit code -9" in verify._run(server, "copy_grads", {})["crash"]


def test_an_infinite_error_is_json(monkeypatch):
    stock = {"error": "inf", "tolerance": 0.0}
    patched = {"error": "0.0", "tolerance": 0.0, "state": "applied", "deepspeed": "0.18.4"}
    judged = verify._judge("average_tensor", stock, patched)
    monkeypatch.setattr("zerofix.cli.run_reproductions", lambda names: [judged])
    told = CliRunner().invoke(main, ["verify", "average_tensor", "--json"])

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    (read,) = json.loads(told.stdout, parse_constant=refuse)
    assert (read["stock"], read["verdict"]) == (float("inf"), "repaired")


def test_verify_without_deepspeed_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["verify"])
    assert result.exit_code == 1
    assert "DeepSpeed is not installed in this environment" in result.output
