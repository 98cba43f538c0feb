"""Runs the queries of some Iceberg cases, as tests.tables.crash.child runs those of SQL tables."""

from __future__ import annotations

import sys

from tests.support.crash.child import main
from tests.tables.crash.iceberg_cases import IcebergCase

if __name__ == "__main__":
    main(*sys.argv[1:], kind=IcebergCase)
