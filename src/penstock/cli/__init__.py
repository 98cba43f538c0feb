"""The command line ``penstock``."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Return the exit code: 0, 1 after an error, 2 for wrong usage, 130 after an interrupt.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from penstock.cli.app import run, warn_of_secrets
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        # Both extras include the command line.
        extra = "ui" if words[:1] == ["ui"] else "cli"
        print(
            f"error: [MISSING_DEPENDENCY] the command line needs {error.name}: pip install "
            f"'penstock-spark[{extra}]'",
            file=sys.stderr,
        )
        return 1
    if arguments is None:
        warn_of_secrets(words)
    return run(words)
