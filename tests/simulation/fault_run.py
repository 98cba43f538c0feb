"""Apply the faults one by one to a copy of the code, and count the schedules until each is found.

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
        print(seed, outcome.failure.kind, outcome.failure.text[:160].replace(chr(10), " "))
        break
"""


def main() -> int:
    given = _arguments()
    wanted = [fault for fault in FAULTS if given.only is None or given.only in fault.name]
    caught = 0
    with _copy() as unchanged:
        if told := _first_failure(unchanged, given.first, 1):
            print(f"a copy without a fault fails: {told}", file=sys.stderr)
            return 2
    with ThreadPoolExecutor(given.processes) as pool:
        found = pool.map(lambda fault: _run(fault, given.first, given.schedules), wanted)
        for fault, what in zip(wanted, found, strict=True):
            caught += what is not None
            print(f"{fault.name} ({fault.file}): {what or 'NOT CAUGHT'}", flush=True)
    print(f"{caught} of {len(wanted)} caught, with at most {given.schedules} schedules each")
    return 0 if caught >= 0.95 * len(wanted) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.fault_run", description=__doc__)
    parser.add_argument("--only", help="a part of the names of the faults to apply")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--schedules", type=int, default=3000, help="how many schedules for each, at the most"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    return parser.parse_args()


@contextmanager
def _copy(*changes: Change | None) -> Iterator[Path]:
    """A copy of the code with some changes."""
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as folder:
        for name in ("src", "tests/simulation", "tests/support"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        Path(folder, "tests/__init__.py").touch()
        for change in changes:
            if change is None:
                continue
            path = Path(folder, "src/penstock", change.file)
            path.write_text(path.read_text().replace(change.text, change.instead))
        yield Path(folder)


def _run(fault: Fault, first: int, count: int) -> str | None:
    """After how many schedules it was found, and as what; None when it was not."""
    with _copy(fault.change, fault.without) as faulty, _copy(fault.without) as code:
        seed = first
        while found := _first_failure(faulty, seed, first + count - seed):
            number, _, what = found.partition(" ")
            seed = int(number) + 1
            # A schedule that fails without the fault as well says nothing of it.
            if not _first_failure(code, int(number), 1):
                return f"{seed - first} {what}"
    return None


def _first_failure(root: Path, first: int, count: int) -> str:
    """The seed of the first schedule that fails, and how."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(first), str(count)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        check=False,
    )
    # Code that does not even run is caught at once.
    return f"{first} {done.stderr.strip().splitlines()[-1][:160]}" if done.returncode else done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
