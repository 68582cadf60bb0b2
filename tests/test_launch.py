"""`zerofix run -- COMMAND`: zerofix in every process that a launcher starts."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, answer, environment

from zerofix.launch import BOOTSTRAP

# What a program that knows nothing of zerofix can see of it.
SEE = """
import json, os, sys
seen = {"zerofix": "zerofix" in sys.modules, "rank": os.environ.get("RANK"), "argv": sys.argv[1:]}
# One line in one write: ranks share a pipe.
def tell(**more): os.write(1, (json.dumps({**seen, **more}) + "\\n").encode())
"""


def run(*command, path=None, cwd=None, **variables):
    """`zerofix run -- command` and what it prints."""
    return subprocess.run(
        [sys.executable, "-m", "zerofix", "run", "--", *map(str, command)],
        env=environment(path, **variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def told(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture
def program(tmp_path):
    """Writes a program that sees `seen` and can `tell(...)`."""

    def write(text="tell()", name="train.py"):
        (tmp_path / name).write_text(SEE + text)
        return tmp_path / name

    return write


def script(name):
    """A command that an installed package brings."""
    beside_python = Path(sys.executable).with_name(name)
    # `pip install --target` puts commands below the packages.
    places = [beside_python, *(Path(p, "bin", name) for p in sys.path)]
    return next(str(place) for place in places if place.is_file())


def test_arguments_and_exit_code_are_the_commands_own(program):
    done = run(sys.executable, program("tell(); sys.exit(7)"), "--json", "--", "-x", "")
    assert done.returncode == 7
    assert json.loads(done.stdout) == {
        "zerofix": True,
        "rank": None,
        "argv": ["--json", "--", "-x", ""],
    }


def test_signals_reach_the_command(program):
    text = """
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
tell(); sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-m", "zerofix", "run", sys.executable, str(program(text))],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert json.loads(process.stdout.readline())["zerofix"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 5
    process.communicate()


def test_what_cannot_be_run_is_said_with_the_shells_exit_codes(program):
    done = run("no-such-program")
    assert (done.returncode, done.stderr) == (
        127,
        "zerofix run: there is no program no-such-program\n",
    )
    done = run(program())
    assert done.returncode == 126
    assert f"(python {program()}?)" in done.stderr


def test_children_and_spawned_and_forked_workers_have_it(program):
    text = """
import multiprocessing, subprocess
def child(queue): queue.put("zerofix" in sys.modules)
if __name__ == "__main__":
    have = []
    for method in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start(); process.join(); have.append(queue.get())
    shell = f"{sys.executable} -c 'import sys; sys.exit(40 + (\\"zerofix\\" in sys.modules))'"
    tell(children=[*have, subprocess.run(shell, shell=True).returncode])
"""
    (answered,) = told(run(sys.executable, program(text)))
    assert answered["children"] == [True, True, True, 41]


@pytest.mark.parametrize("place", ["PYTHONPATH", "working directory"])
def test_the_users_own_sitecustomize_still_runs(program, tmp_path, place):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['THEIRS'] = __file__")
    text = "import sitecustomize\ntell(theirs=os.environ['THEIRS'], is_it=sitecustomize.__file__)"
    # An empty entry is the working directory.
    path = str(tmp_path) if place == "PYTHONPATH" else ""
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", ""), path])}
    (answered,) = told(run(sys.executable, program(text), cwd=tmp_path, **variables))
    assert answered["zerofix"]
    assert answered["theirs"] == answered["is_it"]
    assert Path(answered["theirs"]).samefile(tmp_path / "sitecustomize.py")


def test_a_sitecustomize_that_fails_is_reported_as_without_zerofix(program, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('theirs')")
    command = [sys.executable, str(program("tell(left='sitecustomize' in sys.modules)"))]
    without = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    done = run(*command, path=tmp_path)
    assert "RuntimeError: theirs" in done.stderr
    # Once by `zerofix run` itself, which is a Python without it.
    assert done.stderr == 2 * without.stderr
    assert told(done) == [{**told(without)[0], "zerofix": True}]


def test_two_that_run_each_other_and_runs_in_runs_come_to_an_end(program, tmp_path):
    other = tmp_path / "another zerofix"
    shutil.copytree(BOOTSTRAP, other)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text(
        "import os; os.environ['TIMES'] = os.environ.get('TIMES', '') + 'x'"
    )
    entries = [other, BOOTSTRAP, other, theirs, ROOT, os.environ.get("PYTHONPATH", "")]
    nested = [sys.executable, "-m", "zerofix", "run", "--", sys.executable]
    text = "tell(times=os.environ['TIMES'], path=os.environ['PYTHONPATH'])"
    path = os.pathsep.join(map(str, entries))
    (answered,) = told(run(*nested, program(text), PYTHONPATH=path))
    assert answered["zerofix"]
    assert answered["times"] == "xxx"  # once in each Python
    assert answered["path"].split(os.pathsep).count(BOOTSTRAP) == 1


def test_a_misspelt_toggle_ends_the_program(program):
    text = (
        "import subprocess; sys.exit(subprocess.run([sys.executable, '-c', 'print(1)']).returncode)"
    )
    done = run(sys.executable, program("os.environ['ZEROFIX_COPYGRADS'] = '0'\n" + text))
    assert (done.returncode, done.stdout) == (1, "")
    assert "zerofix: ZEROFIX_COPYGRADS is not a setting of zerofix. Did you mean" in done.stderr


@pytest.mark.parametrize("deepspeed", [False, True])
def test_a_python_without_zerofix_says_so_if_it_has_a_deepspeed(tmp_path, deepspeed):
    if deepspeed:
        (tmp_path / "deepspeed.py").touch()
    # -I -S is a Python that has nothing; then what a Python does when it starts.
    text = (
        f"import sys; sys.path[:0] = {[BOOTSTRAP, str(tmp_path)]}; import sitecustomize; print(1)"
    )
    command = [sys.executable, "-I", "-S", "-c", text]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n")
    said = f"zerofix: not installed for {sys.executable}, whose DeepSpeed stays as it is: No module"
    assert done.stderr.startswith(said) if deepspeed else done.stderr == ""


LAUNCHERS = {
    "torchrun": lambda: [script("torchrun"), "--nproc_per_node", "2", "--master_port", "0"],
    "deepspeed": lambda: [script("deepspeed"), "--num_gpus", "2", "--no_local_rank"],
    "accelerate": lambda: [
        script("accelerate"),
        "launch",
        "--use_deepspeed",
        "--num_processes",
        "2",
    ],
    "python": lambda: [sys.executable],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_of_a_launcher_has_it(program, launcher):
    answers = told(run(*LAUNCHERS[launcher](), program(), "--lr", "1"))
    ranks = [None] if launcher == "python" else ["0", "1"]
    assert sorted(a["rank"] or "" for a in answers) == [rank or "" for rank in ranks]
    assert all(answer["zerofix"] and answer["argv"] == ["--lr", "1"] for answer in answers)


# Several nodes. The hosts do not exist: what would reach them is shown, and for pdsh run here.

BACKENDS = {"pdsh": "pdsh", "openmpi": "ompi_info", "mpich": "mpirun", "slurm": "sinfo"}


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


def test_settings_reach_every_node_of_deepspeeds_launchers(tmp_path):
    """The command lines that DeepSpeed builds, which it would start."""
    (tmp_path / "hostfile").write_text("worker-0 slots=1\nworker-1 slots=1\n")
    (tmp_path / "bin").mkdir()
    for program in BACKENDS.values():
        executable(tmp_path / "bin" / program, "#!/bin/sh\nexit 9\n")
    program = f"""
        import json, sys
        import zerofix.launch, deepspeed.launcher.runner as runner
        started = []
        class Started:
            returncode = 0
            def __init__(self, command, env): started.append(command)
            def wait(self): pass
        runner.subprocess.Popen = Started
        for launcher in {list(BACKENDS)}:
            runner.main(["--hostfile", "{tmp_path}/hostfile", "--master_addr", "worker-0",
                         "--no_ssh_check", "--quiet", "--launcher", launcher, "train.py"])
        print(json.dumps(started))
    """
    search = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
    toggles = {"ZEROFIX_COPY_GRADS": "force", "ZEROFIX_STRICT": "1"}
    commands = dict(zip(BACKENDS, answer(program, PATH=search, **toggles), strict=True))
    for name, value in toggles.items():
        assert f"export {name}={value}; " in commands["pdsh"][6]
        assert follows(commands["openmpi"], "-x", f"{name}={value}")
        assert follows(commands["mpich"], "-genv", f"{name}={value}")
        assert f",{name}={value}" in next(a for a in commands["slurm"] if "--export=ALL" in a)


def follows(command, first, second):
    return any(command[i : i + 2] == [first, second] for i in range(len(command)))


def test_a_node_that_pdsh_reaches_runs_the_same(program, tmp_path):
    """With a pdsh that runs the node's command here, in a shell that knows nothing of us."""
    (tmp_path / "hostfile").write_text("worker-0 slots=2\n")
    # In the working directory, which DeepSpeed puts first on the path of all nodes.
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['THEIRS'] = '1'")
    (tmp_path / "bin").mkdir()
    executable(
        tmp_path / "bin" / "pdsh",
        f"""#!{sys.executable} -S
import os, subprocess, sys
command = " ".join(sys.argv[sys.argv.index("-w") + 2:])
clean = {{"PATH": os.environ["PATH"], "DS_ACCELERATOR": "cpu"}}
subprocess.run(["sh", "-c", command.replace("%n", "0")], env=clean, check=True)
""",
    )
    command = [script("deepspeed"), "--force_multi", "--hostfile", tmp_path / "hostfile"]
    command += ["--master_addr", "worker-0", "--no_ssh_check", "--no_local_rank"]
    text = "tell(strict=os.environ.get('ZEROFIX_STRICT'), theirs=os.environ.get('THEIRS'))"
    done = run(
        *command,
        program(text),
        cwd=tmp_path,
        PATH=f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}",
        ZEROFIX_STRICT="1",
    )
    answers = told(done)
    assert sorted(answer["rank"] for answer in answers) == ["0", "1"]
    assert all(a["zerofix"] and a["strict"] == a["theirs"] == "1" for a in answers)
