"""``penstock reconcile``: whether a PostgreSQL table and its copy are equal, and repair of the copy."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.commands.shared import FAILED, Run, argument, option
from penstock.cli.output import Section

if TYPE_CHECKING:
    from penstock.json_text import Json
    from penstock.reconciliation.report import Reconciliation

_SOURCE = "'postgresql://app@db/shop?publication=shop&table=orders'"
EXAMPLES = (
    f"penstock reconcile {_SOURCE} public.orders --url postgresql://app@copies/shop",
    f"penstock reconcile {_SOURCE} orders --url delta:///data/tables --settle 300",
    f"penstock reconcile {_SOURCE} orders --repair",
)


def reconcile(
    run: Run,
    source: Annotated[
        str,
        argument(
            "SOURCE",
            "postgresql://…?publication=NAME&table=TABLE, as for a feed. The slot is never advanced.",
        ),
    ],
    copy: Annotated[
        str, argument("COPY", "The table that is the copy, in the store or folder (delta:///…) of --url.")
    ],
    columns: Annotated[
        list[str] | None,
        option(
            "--column",
            "COLUMN",
            "Compare only this column and the key; can be repeated. By default, all columns.",
        ),
    ] = None,
    settle: Annotated[
        float,
        option(
            "--settle",
            "SECONDS",
            "How long a difference has to persist before it counts: longer than the copy lags.",
            min=0,
        ),
    ] = 60.0,
    timeout: Annotated[
        float,
        option(
            "--timeout",
            "SECONDS",
            "The time after which rows that keep changing are reported as undecided.",
            min=0,
        ),
    ] = 600.0,
    checkpoint: Annotated[
        str | None,
        option(
            "--checkpoint",
            "PATH",
            "The checkpoint of the query that fills the copy: a row counts as different only after the query "
            "has caught up, instead of after --settle.",
        ),
    ] = None,
    queue_store: Annotated[
        str | None,
        option("--queue-store", "URL", "The store of the queue that this query reads, if a pump fills it."),
    ] = None,
    range_rows: Annotated[
        int, option("--range-rows", "ROWS", "How many rows to compare at a time.", min=1)
    ] = 50_000,
    rows: Annotated[
        int, option("--rows", "ROWS", "How many differing rows to show at most.", "-n", min=0)
    ] = 20,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Correct rows that differ, insert missing ones and delete extra ones."),
    ] = False,
) -> None:
    """Compare a PostgreSQL table with its copy. Exits with 1 if they differ.

    Both tables may be written meanwhile. A row that differs is read again until it is equal or has not
    changed for --settle seconds, or with --checkpoint until the copy has caught up. With --repair, the exit
    code is 0 if all rows that differed were repaired. -v shows the progress.
    """
    from penstock.reconciliation.reconcile import reconcile as compare
    from penstock.tables.sink import TableSink

    result = compare(
        source,
        TableSink(copy, url=run.url),
        columns=columns or None,
        settle=settle,
        timeout=timeout,
        range_rows=range_rows,
        most_rows=rows,
        checkpoint=checkpoint,
        queue_store=queue_store,
        repair=repair,
    )
    run.output.describe(_data(result), _sections(result))
    if not result.equal and not (repair and result.repaired == result.differences and not result.undecided):
        raise typer.Exit(FAILED)


def _data(result: Reconciliation) -> Json:
    from penstock.feeds.postgres.server import lsn

    data = asdict(result)
    for name in ("first_position", "position"):
        data[name] = lsn(data[name])
    for difference in data["differing_ranges"]:
        difference["after"], difference["upto"] = (
            _json_key(difference["after"]),
            _json_key(difference["upto"]),
        )
    for difference in data["differing_rows"]:
        difference["key"] = _json_key(difference["key"])
    return data


def _json_key(key: dict[str, object] | None) -> dict[str, object] | None:
    """Convert a key for JSON; other values become PostgreSQL's text."""
    from penstock.reconciliation.postgres_sql import as_text

    if key is None:
        return None
    return {
        name: value if isinstance(value, bool | int | str) else as_text(value) for name, value in key.items()
    }


def _sections(result: Reconciliation) -> list[Section]:
    data = _data(result)
    pairs = [
        ("result", _result(result)),
        ("rows of the source", f"{result.rows:,}"),
        ("rows of the copy", f"{result.copy_rows:,}"),
        ("ranges", f"{result.ranges:,}"),
        ("WAL positions", f"{data['first_position']} to {data['position']}"),
        ("missing in the copy", f"{result.missing:,}"),
        ("only in the copy", f"{result.extra:,}"),
        ("different", f"{result.different:,}"),
        ("undecided", f"{result.undecided:,}"),
        ("repaired", f"{result.repaired:,}"),
    ]
    sections = [Section("", pairs)]
    if result.differing_ranges:
        ranges = [
            (
                difference["number"],
                _key_text(difference["after"]),
                _key_text(difference["upto"]),
                *_counts(difference),
            )
            for difference in data["differing_ranges"]
        ]
        titles = ("range", "after", "up to", "missing", "extra", "different")
        sections.append(Section.of_cells("ranges that differ", titles, ranges, right={0, 3, 4, 5}))
    if result.differing_rows:
        rows = [
            (_key_text(difference["key"]), difference["kind"], ", ".join(difference["columns"]))
            for difference in data["differing_rows"]
        ]
        sections.append(Section.of_cells("first rows that differ", ("key", "copy", "columns"), rows))
    return sections


def _result(result: Reconciliation) -> str:
    if result.equal:
        return "equal"
    if not result.differences:
        return "undecided"
    return "different" if result.repaired < result.differences else "different, and repaired"


def _key_text(key: dict[str, object] | None) -> str:
    return "" if key is None else ", ".join(f"{name} = {value}" for name, value in key.items())


def _counts(difference: Json) -> tuple[int, int, int]:
    return difference["missing"], difference["extra"], difference["different"]
