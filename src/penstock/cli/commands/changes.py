"""``penstock changes``: change feeds."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.commands.shared import Run, argument, command, option
from penstock.cli.output import Column, Row, Section, as_json_text, poll_until_closed
from penstock.errors import InvalidChangeOptionError, InvalidInputError

if TYPE_CHECKING:
    from penstock.changes.options import ChangeOptions, ChangeRange
    from penstock.feeds.protocol import OpenFeed

_BLOCK_ROWS = 1000
_OPTIONS = {"starting": "--from", "ending": "--to"}
_BOUND = re.compile(r"(starting|ending)(?:Version|Timestamp)")
_METADATA = ("_change_type", "_commit_version", "_commit_timestamp")
_SIGNS = {
    "insert": ("+", "green"),
    "delete": ("-", "red"),
    "update_preimage": ("<", "yellow"),
    "update_postimage": (">", "bright_yellow"),
}

group = typer.Typer(help="Show change feeds, and the lag of PostgreSQL slots.", no_args_is_help=True)

FeedArgument = Annotated[
    str,
    argument(
        "FEED",
        "queue:NAME, delta:PATH, iceberg:TABLE, snapshots:PATH?row_id=COLUMN or "
        "postgresql://…?publication=NAME, whose slot must exist: slot=NAME, or else penstock_ and the "
        "publication's name. A delta:PATH whose change data feed is off needs ?row_id=COLUMN too: the "
        "column that identifies rows; several are row_id=A&row_id=B.",
    ),
]
PostgresArgument = Annotated[
    str,
    argument("FEED", "postgresql://…?publication=NAME; add slot=NAME if the slot is not penstock_NAME."),
]
ModeOption = Annotated[
    str,
    option(
        "--mode",
        "MODE",
        "none, dropCarryovers or netChanges. `show` computes net changes of the whole range, and `tail` "
        "of each commit.",
    ),
]
UpdatesOption = Annotated[
    bool, typer.Option("--updates", help="Show a row before and after its update: < and >.")
]


@command(
    group,
    "show",
    "penstock changes show queue:flights --from 10 --to 12 --updates",
    "penstock changes show delta:/data/orders --from 2026-01-31T12:00:00Z --mode netChanges",
    "penstock changes show 'snapshots:/data/daily?row_id=id'",
    "penstock changes show queue:flights --json | jq ._change_type",
)
def show(
    run: Run,
    feed: FeedArgument,
    start: Annotated[
        str | None, option("--from", "COMMIT", "The first commit: its version, or a time.")
    ] = None,
    end: Annotated[str | None, option("--to", "COMMIT", "The last commit: its version, or a time.")] = None,
    mode: ModeOption = "dropCarryovers",
    updates: UpdatesOption = False,
    rows: Annotated[
        int | None, option("--rows", "ROWS", "How many rows to show at most.", "-n", min=0)
    ] = None,
) -> None:
    """Show the changes of a feed, commit by commit.

    Inserted rows are marked +, and deleted ones -. Nothing is consumed.
    """
    from penstock.changes.options import EVER

    open_feed, bounds = _open_feed(run, feed), _parse_range(start, end)
    after = bounds.start(open_feed)
    printer = _ChangePrinter(run, open_feed, _change_options(mode, updates, EVER), after)
    printer.show(after, bounds.end(open_feed, after), rows)


@command(
    group,
    "tail",
    "penstock changes tail queue:flights",
    "penstock changes tail queue:flights -n 20",
    "penstock changes tail delta:/data/orders --json",
)
def tail(
    run: Run,
    feed: FeedArgument,
    start: Annotated[
        str | None, option("--from", "COMMIT", "The first commit; by default the next new one.")
    ] = None,
    mode: ModeOption = "dropCarryovers",
    updates: UpdatesOption = False,
    rows: Annotated[int | None, option("--rows", "ROWS", "Stop after this many.", "-n", min=0)] = None,
) -> None:
    """Show the changes of a feed as they arrive.

    It ends with Ctrl-C, or after --rows. Nothing is consumed.
    """
    from penstock.changes.options import COMMIT

    open_feed = _open_feed(run, feed)
    position = open_feed.newest(open_feed.oldest()) if start is None else _parse_range(start).start(open_feed)
    # Compute net changes of each commit, because those of all new commits would depend on the time of
    # reading.
    printer = _ChangePrinter(run, open_feed, _change_options(mode, updates, COMMIT), position)
    for _ in poll_until_closed(lambda: printer.shown):
        newest = open_feed.newest(position)
        if newest > position:
            printer.show(position, newest, None if rows is None else rows - printer.shown)
            position = newest
        if printer.shown == rows:
            return


@command(group, "lag", "penstock changes lag 'postgresql://app@db/shop?publication=orders'")
def lag(run: Run, feed: PostgresArgument) -> None:
    """Show how much WAL a PostgreSQL feed's slot retains.

    Also how much of it Spark has not read and logged yet, and the oldest open transaction, which holds it
    back.
    """
    from penstock.cli.units import size_text
    from penstock.feeds.postgres import PostgresFeed
    from penstock.feeds.urls import parse

    postgres = parse(feed, store=run.url)
    if not isinstance(postgres, PostgresFeed):
        raise InvalidInputError("only a PostgreSQL feed has a slot, which may lag behind", condition="NO_LAG")
    lag = postgres.lag()
    data = {
        "slot": postgres.slot,
        "retained_bytes": lag.retained,
        "unconfirmed_bytes": lag.unconfirmed,
        "open_transaction": None if lag.open_transaction is None else asdict(lag.open_transaction),
    }
    pairs = [
        ("slot", postgres.slot),
        ("kept on the server", size_text(lag.retained)),
        ("not read and logged", size_text(lag.unconfirmed)),
    ]
    if lag.open_transaction is not None:
        pairs.append(("oldest open transaction", lag.open_transaction.describe()))
    run.output.describe(data, [Section("", pairs)])


class _ChangePrinter:
    """Prints the changes of a feed and counts the rows."""

    def __init__(self, run: Run, feed: OpenFeed, options: ChangeOptions, after: int) -> None:
        self._feed, self._options = feed, options
        self._description = feed.describe(after)
        names = [name for name in self._description.schema.names if name not in _METADATA]
        self._print = run.output.row_printer(change_columns(names), change_style)
        self.shown = 0

    def show(self, after: int, upto: int, limit: int | None) -> None:
        """Print the changes of a range, at most ``limit`` of them."""
        from penstock.arrow.arrays import first_rows
        from penstock.changes.reading import local_changes
        from penstock.cli.load.wire import plain_rows

        if after >= upto:
            return
        tables = local_changes(self._feed, after, upto, self._options, self._description)
        for table in tables if limit is None else first_rows(tables, limit):
            for first in range(0, table.num_rows, _BLOCK_ROWS):
                self._print(plain_rows(table.slice(first, _BLOCK_ROWS)))
            self.shown += table.num_rows


def change_columns(names: list[str]) -> list[Column]:
    """Return the columns of changes in text: their sign, version and time, and the data columns."""
    return [
        Column("_change_type", "", lambda kind: _SIGNS[kind][0]),
        Column("_commit_version", "version", as_json_text),
        Column("_commit_timestamp", "time", as_json_text),
        *(Column(name, name, as_json_text) for name in names),
    ]


def change_style(row: Row) -> str:
    return _SIGNS[str(row["_change_type"])][1]


def _open_feed(run: Run, url: str) -> OpenFeed:
    from penstock.feeds.urls import parse

    return parse(url, store=run.url).open()


def _change_options(mode: str, updates: bool, net_window: int) -> ChangeOptions:
    from penstock.changes.options import MODES, ChangeOptions, one_of

    return ChangeOptions(one_of("--mode", mode, MODES, "INVALID_DEDUPLICATION_MODE"), updates, net_window)


def _parse_range(start: str | None, end: str | None = None) -> ChangeRange:
    """Return the range of the options; errors name the options."""
    from penstock.changes.options import ChangeRange

    try:
        return ChangeRange.of({**_bound("starting", start), **_bound("ending", end)})
    except InvalidChangeOptionError as error:
        message = _BOUND.sub(lambda match: _OPTIONS[match[1]], error.message)
        raise InvalidChangeOptionError(message, condition=error.condition, **error.parameters) from None


def _bound(which: str, text: str | None) -> dict[str, str]:
    """Return a bound as an option of a read: digits are a version, anything else is a time."""
    if text is None:
        return {}
    kind = "Version" if text.lstrip("-").isdigit() else "Timestamp"
    return {f"{which}{kind}": text}
