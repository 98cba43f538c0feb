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

    found = compare(
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
    run.output.describe(_data(found), _sections(found))
    if not found.equal and not (repair and found.repaired == found.differences and not found.undecided):
        raise typer.Exit(FAILED)


def _data(found: Reconciliation) -> Json:
    from penstock.feeds.postgres.server import lsn

    data = asdict(found)
    for name in ("first_position", "position"):
        data[name] = lsn(data[name])
    for each in data["differing_ranges"]:
        each["after"], each["upto"] = _plain(each["after"]), _plain(each["upto"])
    for each in data["differing_rows"]:
        each["key"] = _plain(each["key"])
    return data


def _plain(key: dict[str, object] | None) -> dict[str, object] | None:
    """Return a key with values that JSON has, or as PostgreSQL writes them."""
    from penstock.reconciliation.postgres_sql import as_text

    if key is None:
        return None
    return {
        name: value if isinstance(value, bool | int | str) else as_text(value) for name, value in key.items()
    }


def _sections(found: Reconciliation) -> list[Section]:
    data = _data(found)
    pairs = [
        ("result", _result(found)),
        ("rows of the source", f"{found.rows:,}"),
        ("rows of the copy", f"{found.copy_rows:,}"),
        ("ranges", f"{found.ranges:,}"),
        ("WAL positions", f"{data['first_position']} to {data['position']}"),
        ("missing in the copy", f"{found.missing:,}"),
        ("only in the copy", f"{found.extra:,}"),
        ("different", f"{found.different:,}"),
        ("undecided", f"{found.undecided:,}"),
        ("repaired", f"{found.repaired:,}"),
    ]
    sections = [Section("", pairs)]
    if found.differing_ranges:
        ranges = [
            (each["number"], _shown(each["after"]), _shown(each["upto"]), *_counts(each))
            for each in data["differing_ranges"]
        ]
        titles = ("range", "after", "up to", "missing", "extra", "different")
        sections.append(Section.of_cells("ranges that differ", titles, ranges, right={0, 3, 4, 5}))
    if found.differing_rows:
        rows = [
            (_shown(each["key"]), each["kind"], ", ".join(each["columns"])) for each in data["differing_rows"]
        ]
        sections.append(Section.of_cells("first rows that differ", ("key", "copy", "columns"), rows))
    return sections


def _result(found: Reconciliation) -> str:
    if found.equal:
        return "equal"
    if not found.differences:
        return "undecided"
    return "different" if found.repaired < found.differences else "different, and repaired"


def _shown(key: dict[str, object] | None) -> str:
    return "" if key is None else ", ".join(f"{name} = {value}" for name, value in key.items())


def _counts(each: Json) -> tuple[int, int, int]:
    return each["missing"], each["extra"], each["different"]
