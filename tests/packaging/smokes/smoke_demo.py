"""The demonstration, of two days."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

done = subprocess.run(
    [sys.executable, "-m", "penstock.demo", "--until", "48", "--folder", "demo", "--json"],
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
)
assert done.returncode == 0, done.stdout + done.stderr
assert json.loads(done.stdout)["holds"] is True
assert Path("demo/delays.png").stat().st_size > 0
