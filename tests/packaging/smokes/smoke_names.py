"""Every public name is there, or says in one sentence which extra it needs.

Those that are asked for are printed.
"""

from __future__ import annotations

import sys

from asking import assert_named

import penstock
import penstock.testing
from penstock.errors import MissingDependencyError

asked = set()
for home in (
    penstock,
    penstock.changes,
    penstock.limits,
    penstock.logs,
    penstock.modes,
    penstock.state,
    penstock.testing,
):
    for name in getattr(home, "__all__", ()):
        try:
            getattr(home, name)
        except MissingDependencyError as error:
            assert_named(error.parameters["extra"], str(error))
            asked.add(error.parameters["extra"])
print(*sorted(asked), file=sys.stdout)
