"""Take away one of the feed's checks after the other, and count the histories until the loss is found.

``make history-faults ARGS="--histories 1000 --only renamed"``; with ``--pump`` the guards of a pump.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from penstock.feeds.postgres import lookahead, rows, schema_changes, unlogged
from penstock.feeds.postgres.lookahead import Lookahead
from penstock.feeds.postgres.schema_changes import Fit
from penstock.feeds.postgres.values import from_text
from tests.feeds.postgres.changing_tables import DEFINITIONS, KINDS
from tests.feeds.postgres.pump_faults import PUMP_FAULTS, PumpFault
from tests.feeds.postgres.pump_histories import play_pumps
from tests.feeds.postgres.schema_histories import play_many
from tests.support.postgres import start_postgres


@dataclass(frozen=True)
class Fault:
    """Checks that a feed must not lack, each as its owner, its name and what is there instead."""

    name: str
    checks: tuple[tuple[object, str, Callable[..., Any]], ...]
    definitions: Sequence[str] = DEFINITIONS
    """The changes of definitions to play, where chance would seldom bring them together."""
    kinds: Sequence[str] = KINDS

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, instead in self.checks:
                stack.enter_context(patch.object(owner, name, instead))
            yield


def _passes(*_: object, **__: object) -> None:
    """A check that never refuses."""


def _finds_none(*_: object, **__: object) -> list[Any]:
    """A search that never finds anything."""
    return []


_values = rows.TableColumns.values


def _with_nulls(columns: Any, field: pa.Field) -> pa.Array:
    """A column's values, NULL in a key as well."""
    return _values(columns, field.with_nullable(True))


def _as_they_come(columns: Any, field: pa.Field) -> pa.Array:
    """A column's values, without a name for those that its type cannot hold."""
    return from_text(columns.selected_text(columns.places[field.name]), field.type)


FAULTS = (
    Fault(
        "rows are read by a key that is no longer theirs",
        (
            (Fit, "_other_key", _passes),
            (Lookahead, "_other_primary_key", _passes),
            (lookahead, "partition_key_errors", _finds_none),
            (rows.TableColumns, "values", _with_nulls),
        ),
    ),
    Fault(
        "a primary key that the log does not show is taken for the planned one",
        ((unlogged, "_replaced_keys", _finds_none), (unlogged, "ambiguous_keys", _finds_none)),
        ("identity", "key", "no_key", "rename_key"),
    ),
    Fault("a renamed or dropped column is missing", ((Fit, "_dropped", _passes),)),
    Fault("a value of another type is cast", ((Fit, "_retyped", _passes),)),
    Fault(
        "columns that have changed names are mixed up",
        (
            (Fit, "_exchanged", _passes),
            (unlogged, "_replaced", _finds_none),
            (unlogged, "ambiguous_columns", _finds_none),
        ),
        ("exchange", "rename"),
    ),
    Fault("an added column is left out", ((Fit, "_added", _passes),)),
    Fault(
        "a column that was replaced is taken for the earlier one",
        ((unlogged, "_replaced", _finds_none), (unlogged, "ambiguous_columns", _finds_none)),
    ),
    Fault(
        "rows of a recreated table follow those of the earlier one",
        (
            (Fit, "_is_accepted", lambda *_: True),
            (unlogged, "_tables", _finds_none),
            (unlogged, "recreated_tables", _finds_none),
        ),
    ),
    Fault("rows of a table that joins the publication are missing", ((unlogged, "_tables", _finds_none),)),
    Fault(
        "rows of a table that left the publication are missing",
        ((unlogged, "unpublished_tables", _finds_none),),
        ("unpublish", "publish_again"),
    ),
    Fault("rows of an attached partition are missing", ((unlogged, "_partitions", _finds_none),)),
    Fault(
        "a partition that was attached and detached is not noticed",
        ((unlogged, "temporary_partitions", _finds_none),),
        ("attach", "detach", "partition"),
        ("partitioned",),
    ),
    Fault("a value that a type cannot hold is not named", ((rows.TableColumns, "values", _as_they_come),)),
    Fault("rows outlive a TRUNCATE", ((schema_changes, "truncated", _passes),)),
)


def main() -> int:
    arguments = _arguments()
    faults: Sequence[Fault | PumpFault] = PUMP_FAULTS if arguments.pump else FAULTS
    parts = (arguments.only or "").split("|")
    wanted = [fault for fault in faults if any(part in fault.name for part in parts)]
    most = arguments.histories or (30 if arguments.pump else 1000)
    server = start_postgres()
    try:
        found = [_histories_until_found(server.url, fault, most, arguments.first) for fault in wanted]
    finally:
        server.stop()
    caught = len(wanted) - found.count(None)
    print(f"{caught} of {len(wanted)} found, in at most {most} histories each")
    return 1 if None in found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.feeds.postgres.history_faults", description=__doc__
    )
    parser.add_argument("--pump", action="store_true", help="take away the guards of a pump")
    parser.add_argument("--only", help="parts of the names of the faults to apply, with | between them")
    parser.add_argument("--first", type=int, default=0, help="the seed")
    parser.add_argument("--histories", type=int, help="how many for each, at the most")
    return parser.parse_args()


def _histories_until_found(url: str, fault: Fault | PumpFault, most: int, first: int) -> int | None:
    played: list[list[str]] = []
    plays = play_pumps if isinstance(fault, PumpFault) else partial(play_many, shrink=False)
    began = time.monotonic()
    with fault.applied():
        try:
            plays(url, most, fault.definitions, fault.kinds, first=first, played=played.append)
        except Exception as error:
            text = repr(str(error).partition("\n")[0][:120])
            took = f"{len(played) + 1} in {time.monotonic() - began:.0f} s"
            print(f"{fault.name}: {took}, {type(error).__name__} {text}", flush=True)
            return len(played) + 1
    print(f"{fault.name}: NOT FOUND", flush=True)
    return None


if __name__ == "__main__":
    raise SystemExit(main())
