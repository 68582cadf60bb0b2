"""Runs one reproduction in this process: ``python -m zerofix.repro FIX``.

A line of stdout is the result: RESULT and JSON.
"""

import importlib
import json
import sys

import zerofix
from zerofix.verify import RESULT

if __name__ == "__main__":  # and not in a process that a reproduction spawns
    name = sys.argv[1]
    reproduction = importlib.import_module(f"zerofix.repro.{name}")
    error = float(reproduction.run())
    status = zerofix.status()
    print(
        RESULT
        + json.dumps(
            {
                "measures": reproduction.MEASURES,
                "tolerance": reproduction.TOLERANCE,
                "error": repr(error),
                "state": status[name].state.value,
                "reason": status[name].reason,
                "deepspeed": status.deepspeed,
            }
        )
    )
