"""Stream the flights of NYC 2013 through queues, exactly once, with a crash in the middle."""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
from pathlib import Path

from penstock.errors import PenstockError


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 when its proof holds."""
    parser = argparse.ArgumentParser(prog="penstock demo", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("demo-output"), help="for store, checkpoints and plot"
    )
    parser.add_argument("--url", help="the store; a SQLite file in the folder by default")
    parser.add_argument("--until", type=int, help="the last simulated hour; the whole year by default")
    parser.add_argument("--json", action="store_true", help="the result as JSON, and what happens on stderr")
    given = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Whoever follows a file sees a line when it is said.
            stream.reconfigure(line_buffering=True)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        from rich.console import Console

        from penstock.demo.run import run

        result = run(given.folder, url=given.url, until=given.until, console=Console(stderr=given.json))
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(result.to_dict()))
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
