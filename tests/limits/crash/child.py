"""Runs the queries of some cases with a limit, as tests.support.crash.child runs those of queues."""

from __future__ import annotations

import sys

from tests.limits.crash.cases import LimitCase
from tests.support.crash.child import main

if __name__ == "__main__":
    main(*sys.argv[1:], kind=LimitCase)
