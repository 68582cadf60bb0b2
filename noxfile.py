"""Other releases of DeepSpeed: what zerofix does to each, its reproductions, the release tests.

All sessions share the torch of the environment that nox runs in; each release lies in a folder
of its own, .deepspeed/RELEASE, that goes first on the module path. `nox -t ci` runs what .ci/run
has time for.
"""

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import nox

from zerofix.gate import has_defect
from zerofix.patches import CATALOGUE

TABLE = json.loads(Path("zerofix", "releases.json").read_text())
EVERY = TABLE["releases"]


def covering() -> dict[str, list[str]]:
    """Releases and fixes: each fix once for each of the wrong codes that releases have."""
    bodies = {
        (path, release): body
        for path, found in TABLE["targets"].items()
        for body, releases in found.items()
        for release in releases
    }
    left: dict[tuple[str, ...], set[str]] = {}
    for fix in CATALOGUE:
        for release in EVERY:
            if has_defect(fix, release):
                code = [bodies[target.path, release] for target in fix.targets]
                left.setdefault((fix.name, *code), set()).add(release)
    chosen = {}
    while left:
        best = max(EVERY, key=lambda release: sum(release in found for found in left.values()))
        chosen[best] = [fix for (fix, *_), found in left.items() if best in found]
        left = {code: found for code, found in left.items() if best not in found}
    return chosen


# 0.18.4 is what `make test` runs on. These are the releases at which a body changes that a fix
# is about, those around them, and the newest. They have all of tests/releases.
RELEASES = [
    "0.16.0",
    "0.16.9",
    "0.17.2",
    "0.17.6",
    "0.18.2",
    "0.18.9",
    "0.19.0",
    "0.19.3",
    "0.19.8",
]


# Each has a native CPUAdam of its own; 0.18.4 has that of 0.18. The others are tested on resuming
# alone.
OWN_CPU_ADAM = ["0.16.0", "0.19.0", "0.19.8"]
# The releases between have the SuperOffload of one of these, or of 0.18.4, or none.
OWN_SUPEROFFLOAD = ["0.18.2", "0.18.9", "0.19.8"]


@nox.session(venv_backend="none", tags=["ci"])
def quick(session: nox.Session) -> None:
    """What becomes of each fix on every release, and whether its edits are in force."""
    tests = "tests/releases/test_activation.py"
    command = [sys.executable, "-m", "pytest", "--quiet"]
    command += [f"{tests}::test_reverting_puts_back_the_same_objects_and_applying_brings_all_again"]
    command += [f"{tests}::test_the_table_of_releases_has_the_bodies_that_are_installed"]

    def check(deepspeed: str) -> str:
        env = os.environ | {"PYTHONPATH": str(installed(deepspeed))}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.stdout + done.stderr if done.returncode else ""

    with ThreadPoolExecutor(2) as pool:
        outputs = dict(zip(EVERY, pool.map(check, EVERY), strict=True))
    if failed := {release: output for release, output in outputs.items() if output}:
        print(*failed.values(), sep="\n")
        session.error(f"not as releases.json says: {', '.join(failed)}")


@nox.session(venv_backend="none", tags=["ci"], default=False)
def reproductions(session: nox.Session) -> None:
    """zerofix verify, of each fix on one release for each code that it repairs."""
    for deepspeed, fixes in covering().items():
        env = shared_operations(installed(deepspeed))
        session.run(sys.executable, "-m", "zerofix", "verify", *fixes, env=env)


@nox.session(venv_backend="none")
@nox.parametrize("deepspeed", EVERY, ids=EVERY)
def verify(session: nox.Session, deepspeed: str) -> None:
    """zerofix verify; with `-- --write` its result goes to benchmarks/results."""
    env = shared_operations(installed(deepspeed))
    program = (
        ["benchmarks/verify.py"] if "--write" in session.posargs else ["-m", "zerofix", "verify"]
    )
    session.run(sys.executable, *program, env=env)


@nox.session(venv_backend="none")
@nox.parametrize(
    "deepspeed", RELEASES, ids=RELEASES, tags=[["ci"] if r == EVERY[-1] else [] for r in RELEASES]
)
def release(session: nox.Session, deepspeed: str) -> None:
    """tests/releases on one release."""
    env = shared_operations(installed(deepspeed))
    tests = ["tests/releases", "-n", "4", "--dist", "loadfile"]
    if deepspeed not in OWN_CPU_ADAM:
        tests.append("--ignore=tests/releases/test_cpu_adam.py")
    if deepspeed not in OWN_SUPEROFFLOAD:
        tests.append("--ignore=tests/releases/test_superoffload.py")
        tests.append("--ignore=tests/releases/test_superoffload_worker.py")
    session.run(sys.executable, "-m", "pytest", *tests, *session.posargs, env=env)


def installed(deepspeed: str) -> Path:
    """The folder of a release, which is installed there at first."""
    folder = Path(".deepspeed", deepspeed).absolute()
    if not (folder / "deepspeed").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--no-build-isolation"]
        subprocess.run([*command, "--target", str(folder), f"deepspeed=={deepspeed}"], check=True)
    return folder


def shared_operations(folder: Path) -> dict[str, str]:
    """The environment in which a release finds CPUAdam compiled by another of the same source.

    Compiling takes most of a minute, and is done again when a path or a date is another: such
    releases are reached by one link, and their sources are of 1970. One session at a time.
    """
    digest = hashlib.sha256(f"{sys.version} {metadata.version('torch')}".encode())
    sources = folder / "deepspeed" / "ops" / "csrc"
    for file in sorted([*sources.glob("*/cpu_adam*"), sources / "includes" / "simd.h"]):
        digest.update(file.read_bytes())
        os.utime(file, (0, 0))
    link = folder.parent / digest.hexdigest()[:16]
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    return {"PYTHONPATH": str(link), "TORCH_EXTENSIONS_DIR": f"{link}-compiled"}
