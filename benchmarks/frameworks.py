"""Training under each framework on stock and with zerofix, as tests/test_frameworks.py does it.

Writes benchmarks/results/frameworks.json: largest errors of a weight against torch.optim in fp64.
"""

import sys
from importlib import metadata
from pathlib import Path

from results import write

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from framework_training import FRAMEWORKS, worker
from processes import ask

if __name__ == "__main__":
    write(
        "frameworks",
        {name: metadata.version(name) for name in ("transformers", "accelerate", "lightning")}
        | {
            "errors": {
                framework: {
                    kind: ask(worker, (framework, "first"), 1, patched=patched, timeout=300)[0]
                    for kind, patched in (("stock", False), ("zerofix", True))
                }
                for framework in FRAMEWORKS
            }
        },
    )
