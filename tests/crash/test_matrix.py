"""The cross product: every kind of query, on both stores, with each guarantee, killed after every state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.crash.cases import Case
from tests.support.crash.chains import at_length, run_chain
from tests.support.crash.children import Children
from tests.support.crash.queries import KINDS

pytestmark = [pytest.mark.crash_full, pytest.mark.timeout(3600)]

# A join may be cut into other tasks when it is repeated, which guarantee=idempotent refuses.
COMBINATIONS = [(kind, "exactly_once") for kind in KINDS] + [
    ("stateless", "idempotent"),
    ("union", "idempotent"),
    ("stateless", "at_least_once"),
    ("aggregate", "at_least_once"),
]


@pytest.mark.parametrize(("kind", "guarantee"), COMBINATIONS)
def test_every_row_is_written_as_guaranteed(
    make_case: Callable[..., Case], children: Children, kind: str, guarantee: str
) -> None:
    cases = [make_case(store, kind, guarantee) for store in ("sqlite", "postgresql")]
    # A task that stops keeps its core.
    run_chain(children, [(case, at_length(case)) for case in cases], master="local[4]")
