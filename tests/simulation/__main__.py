"""Run many schedules of the simulation: ``python -m tests.simulation --schedules 100000``."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time

from tests.simulation import schedules


def main() -> int:
    arguments = _parse_arguments()
    if arguments.replay is not None:
        choices = None if arguments.replay == "" else json.loads(arguments.replay)
        outcome = schedules.run(arguments.first, choices)
        if outcome.failure is None:
            print(f"seed {arguments.first}: no failure")
            return 0
        print(schedules.format_failure(outcome if choices is not None else schedules.shrink(outcome)))
        return 1
    return _run_many(arguments)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--schedules", type=int, default=1_000_000, help="maximum number of schedules")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="maximum duration")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument(
        "--replay",
        nargs="?",
        const="",
        help="run only the schedule of the first seed and print the trace of its failure; "
        "the optional value is the list of decisions from a failure report",
    )
    return parser.parse_args()


def _collect_garbage_rarely() -> None:
    """Collect garbage rarely, since nearly all objects live as long as their schedule.

    This makes a fifth more schedules per second.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _run_many(arguments: argparse.Namespace) -> int:
    start, done, steps = time.monotonic(), 0, 0
    first_seeds = range(arguments.first, arguments.first + arguments.schedules, schedules.PART_SIZE)
    last_report = start
    with multiprocessing.Pool(arguments.processes, _collect_garbage_rarely) as pool:
        for part in pool.imap_unordered(schedules.run_part, first_seeds):
            done, steps = done + part.schedules, steps + part.steps
            seconds = time.monotonic() - start
            if part.failure is not None:
                print(part.failure)
                print(f"after {done} schedules in {seconds:.0f} s")
                return 1
            if time.monotonic() - last_report > 60:
                last_report = time.monotonic()
                print(f"{done} schedules, {done / seconds:.0f} per second", file=sys.stderr, flush=True)
            if done >= arguments.schedules or seconds > arguments.seconds:
                break
    seconds = time.monotonic() - start
    print(
        f"{done} schedules without a failure in {seconds:.0f} s: "
        f"{done / seconds:.0f} per second, {steps / done:.0f} steps each"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
