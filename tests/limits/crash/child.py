"""Runs the queries of some cases with a limit, as tests.crash.child runs those of queues."""

from __future__ import annotations

import sys

from tests.crash.child import main
from tests.limits.crash.cases import LimitCase

if __name__ == "__main__":
    main(*sys.argv[1:], kind=LimitCase)
