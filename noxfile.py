"""The demo and the release tests, on one DeepSpeed release a session.

All sessions share the torch of the environment that nox runs in; each release lies in a folder
of its own, .deepspeed/RELEASE, that goes first on the module path.
"""

import hashlib
import os
import sys
from importlib import metadata
from pathlib import Path

import nox

# 0.18.4 is what `make test` runs on. These are the releases at which a body changes that a fix
# is about, those around them, and the newest.
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


@nox.session(venv_backend="none")
@nox.parametrize("deepspeed", RELEASES, ids=RELEASES)
def release(session: nox.Session, deepspeed: str) -> None:
    """zerofix verify and tests/releases on one release."""
    folder = Path(".deepspeed", deepspeed).absolute()
    if not (folder / "deepspeed").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--no-build-isolation"]
        session.run(*command, "--target", str(folder), f"deepspeed=={deepspeed}")
    env = shared_operations(folder)
    session.run(sys.executable, "-m", "zerofix", "verify", env=env)
    tests = ["tests/releases", "-n", "2", "--dist", "loadfile"]
    if deepspeed not in OWN_CPU_ADAM:
        tests.append("--ignore=tests/releases/test_cpu_adam.py")
    if deepspeed not in OWN_SUPEROFFLOAD:
        tests.append("--ignore=tests/releases/test_superoffload.py")
        tests.append("--ignore=tests/releases/test_superoffload_worker.py")
    session.run(sys.executable, "-m", "pytest", *tests, *session.posargs, env=env)


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
