"""Training under each framework on stock and with zerofix, as tests/test_frameworks.py does it.

Writes benchmarks/results/frameworks.json: largest errors of a weight against torch.optim in fp64.
"""

import sys
from importlib import metadata
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from framework_training import FRAMEWORKS, worker
from processes import ask

PACKAGES = ("transformers", "accelerate", "lightning")


def main() -> None:
    from results import write  # it imports zerofix, which forks for stock must not inherit

    errors = {
        framework: {
            name: ask(worker, (framework, "first"), 1, patched=patched, timeout=300)[0]
            for name, patched in (("stock", False), ("zerofix", True))
        }
        for framework in FRAMEWORKS
    }
    write("frameworks", {name: metadata.version(name) for name in PACKAGES} | {"errors": errors})


if __name__ == "__main__":
    main()
