"""Runs the queries of some Delta cases, as tests.tables.crash.child runs those of SQL tables."""

from __future__ import annotations

import sys

from tests.support.crash.child import main
from tests.tables.crash.delta_cases import DeltaCase

if __name__ == "__main__":
    main(*sys.argv[1:], kind=DeltaCase)
