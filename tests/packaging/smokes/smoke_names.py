"""Every public name is there, or says in one sentence which extra it needs.

Those that are asked for are printed.
"""

from __future__ import annotations

import sys

from asking import assert_named

import penstock as ps
import penstock.testing
from penstock.errors import MissingDependency

asked = set()
for home in (ps, ps.changes, ps.limits, ps.logs, ps.modes, ps.state, penstock.testing):
    for name in getattr(home, "__all__", ()):
        try:
            getattr(home, name)
        except MissingDependency as error:
            assert_named(error.parameters["extra"], str(error))
            asked.add(error.parameters["extra"])
print(*sorted(asked), file=sys.stdout)
