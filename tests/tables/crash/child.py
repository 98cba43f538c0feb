"""Runs the queries of some table cases, as tests.support.crash.child runs those of queues."""

from __future__ import annotations

import sys

from tests.support.crash.child import main
from tests.tables.crash.cases import TableCase

if __name__ == "__main__":
    main(*sys.argv[1:], kind=TableCase)
