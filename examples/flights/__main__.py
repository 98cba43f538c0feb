"""Stream the flights of New York City in 2013 through queues, exactly once, with a crash in the middle."""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
from pathlib import Path

from rich.console import Console

from examples.flights import DemoError
from examples.flights.run import run
from penstock.errors import PenstockError


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and return its exit code: 0 when its proof holds."""
    parser = argparse.ArgumentParser(prog="python -m examples.flights", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("demo-output"), help="for store, checkpoints and plots"
    )
    parser.add_argument("--url", help="the store; a SQLite file in the folder by default")
    parser.add_argument("--until", type=int, help="the last simulated hour; the whole year by default")
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, and progress on stderr"
    )
    options = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # When the output goes to a file, whoever follows it sees each line at once.
            stream.reconfigure(line_buffering=True)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    console = Console(stderr=options.json)
    try:
        result = run(options.folder, url=options.url, until=options.until, console=console)
    except (DemoError, PenstockError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result.to_dict()))
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
