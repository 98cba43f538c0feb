"""`penstock ui`, where a consumer counts as stuck after one second instead of one minute."""

from __future__ import annotations

import sys

from penstock.cli import main
from penstock.ui import consumers

consumers.STUCK_SECONDS = 1.0

if __name__ == "__main__":
    sys.exit(main(["ui", *sys.argv[1:]]))
