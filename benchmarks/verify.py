"""Writes what `zerofix verify --json` finds to benchmarks/results/verify-RELEASE.json."""

import json
import subprocess
import sys

from results import write

command = [sys.executable, "-m", "zerofix", "verify", "--json"]
done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
if done.returncode:
    sys.exit(done.stdout)
verdicts = json.loads(done.stdout)
write(f"verify-{verdicts[0]['deepspeed']}", {"verdicts": verdicts})
