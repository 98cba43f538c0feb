"""Run schedules until told to stop: ``python -m tests.simulation --schedules 100000``."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time

from tests.simulation import schedules


def main() -> int:
    given = _arguments()
    if given.replay is not None:
        choices = None if given.replay == "" else json.loads(given.replay)
        outcome = schedules.run(given.first, choices)
        if outcome.failure is None:
            print(f"seed {given.first}: nothing fails")
            return 0
        print(schedules.report_of(outcome if choices is not None else schedules.shortest(outcome)))
        return 1
    return _many(given)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--schedules", type=int, default=1_000_000, help="how many schedules, at the most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for how long, at the most")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument(
        "--replay",
        nargs="?",
        const="",
        help="run one schedule, of the first seed, and tell its steps; "
        "with the decisions that a failure has printed",
    )
    return parser.parse_args()


def _spare_collections() -> None:
    """A fifth more schedules a second: nearly all that is allocated lives as long as its schedule."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _many(given: argparse.Namespace) -> int:
    began, done, steps = time.monotonic(), 0, 0
    parts = range(given.first, given.first + given.schedules, schedules.PART)
    last_told = began
    with multiprocessing.Pool(given.processes, _spare_collections) as pool:
        for part in pool.imap_unordered(schedules.run_part, parts):
            done, steps = done + part.schedules, steps + part.steps
            seconds = time.monotonic() - began
            if part.failed is not None:
                print(part.failed)
                print(f"after {done} schedules in {seconds:.0f} s")
                return 1
            if time.monotonic() - last_told > 60:
                last_told = time.monotonic()
                print(f"{done} schedules, {done / seconds:.0f} a second", file=sys.stderr, flush=True)
            if done >= given.schedules or seconds > given.seconds:
                break
    seconds = time.monotonic() - began
    print(
        f"{done} schedules without a failure in {seconds:.0f} s: "
        f"{done / seconds:.0f} a second, {steps / done:.0f} steps each"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
