"""Apply each fault to a copy of the code, and count the schedules until the simulation detects it.

``make faults ARGS="--schedules 3000"``
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.simulation.faults import FAULTS
from tests.simulation.faults.fault import Change, Fault

ROOT = Path(__file__).resolve().parents[2]
_CHILD = """
import sys
from tests.simulation import schedules
for seed in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
    outcome = schedules.run(seed)
    if outcome.failure is not None:
        print(seed, outcome.failure.text[:160].replace(chr(10), " "))
        break
"""


def main() -> int:
    arguments = _parse_arguments()
    faults = [fault for fault in FAULTS if arguments.only is None or arguments.only in fault.name]
    detected = 0
    with _copy() as unchanged:
        if failure := _first_failure(unchanged, arguments.first, 1):
            print(f"a copy without a fault fails: {failure}", file=sys.stderr)
            return 2
    with ThreadPoolExecutor(arguments.processes) as pool:
        results = pool.map(lambda fault: _detect(fault, arguments.first, arguments.schedules), faults)
        for fault, result in zip(faults, results, strict=True):
            detected += result is not None
            print(f"{fault.name} ({fault.file}): {result or 'NOT DETECTED'}", flush=True)
    print(f"{detected} of {len(faults)} detected, with at most {arguments.schedules} schedules each")
    return 0 if detected >= 0.95 * len(faults) else 1


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.fault_run", description=__doc__)
    parser.add_argument("--only", help="apply only faults whose names contain this text")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument(
        "--schedules", type=int, default=3000, help="maximum number of schedules for each fault"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    return parser.parse_args()


@contextmanager
def _copy(*changes: Change | None) -> Iterator[Path]:
    """Copy the code to a temporary directory and apply some changes to the copy."""
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as folder:
        for name in ("src", "tests/simulation", "tests/support"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        Path(folder, "tests/__init__.py").touch()
        for change in changes:
            if change is None:
                continue
            path = Path(folder, "src/penstock", change.file)
            path.write_text(path.read_text().replace(change.text, change.replacement))
        yield Path(folder)


def _detect(fault: Fault, first: int, count: int) -> str | None:
    """Return the number of schedules until a fault was detected, and the failure; None if it was not."""
    with _copy(fault.change, fault.baseline) as faulty, _copy(fault.baseline) as baseline:
        seed = first
        while result := _first_failure(faulty, seed, first + count - seed):
            failed_seed, _, failure = result.partition(" ")
            seed = int(failed_seed) + 1
            # A schedule that fails without the fault too does not detect it.
            if not _first_failure(baseline, int(failed_seed), 1):
                return f"after {seed - first} schedules: {failure}"
    return None


def _first_failure(root: Path, first: int, count: int) -> str:
    """Return the seed and the failure of the first schedule that fails; empty if none does."""
    process = subprocess.run(
        [sys.executable, "-c", _CHILD, str(first), str(count)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        # The code does not even run.
        return f"{first} {process.stderr.strip().splitlines()[-1][:160]}"
    return process.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
