"""``penstock changes``: change feeds on the screen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.commands.shared import Run, command
from penstock.cli.following import polls
from penstock.errors import InvalidChangeOption, InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.changes.options import ChangeRange
    from penstock.cli.output.protocol import ChangePrinter
    from penstock.feeds.protocol import OpenChangelog

_BLOCK_ROWS = 1000
_OPTIONS = {"starting": "--from", "ending": "--to"}
_BOUND = re.compile(r"(starting|ending)(?:Version|Timestamp)")
_METADATA = ("_change_type", "_commit_version", "_commit_timestamp")

group = typer.Typer(help="Look at change feeds.", no_args_is_help=True)

FeedArgument = Annotated[
    str,
    typer.Argument(
        metavar="FEED",
        show_default=False,
        help="queue:NAME, delta:PATH, iceberg:TABLE, snapshots:PATH?row_id=COLUMN or postgresql://…?publication=NAME, whose "
        "slot has to be there: slot=NAME, or else penstock_ and the publication's name. A delta:PATH whose change data feed "
        "is off needs ?row_id=COLUMN too: the column that tells rows apart; several are row_id=A&row_id=B.",
    ),
]
ModeOption = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="MODE",
        help="none, dropCarryovers or netChanges: of the whole range, and for tail of each commit.",
    ),
]
UpdatesOption = Annotated[
    bool,
    typer.Option("--updates", show_default=False, help="Show a row before and after its update: < and >."),
]
RowsOption = Annotated[
    int | None,
    typer.Option("--rows", "-n", metavar="ROWS", min=0, show_default=False, help="How many at the most."),
]


@command(
    group,
    "show",
    examples=[
        "penstock changes show queue:flights --from 10 --to 12 --updates",
        "penstock changes show delta:/data/orders --from 2026-01-31T12:00:00Z --mode netChanges",
        "penstock changes show 'snapshots:/data/daily?row_id=id'",
        "penstock changes show queue:flights --json | jq ._change_type",
    ],
)
def show(
    run: Run,
    feed: FeedArgument,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="COMMIT", show_default=False, help="The first commit: its version, or a time."
        ),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="COMMIT", show_default=False, help="The last commit: its version, or a time."
        ),
    ] = None,
    mode: ModeOption = "dropCarryovers",
    updates: UpdatesOption = False,
    rows: RowsOption = None,
) -> None:
    """Show the changes of a feed, commit by commit: + for inserted rows, - for deleted ones."""
    from penstock.changes.options import EVER

    opened, bounds = _opened(run, feed), _range(start, end)
    after = bounds.start(opened)
    view = _View(run, opened, mode, updates, after=after, net_window=EVER)
    view.show(after, bounds.end(opened, after), rows)


@command(
    group,
    "tail",
    examples=[
        "penstock changes tail queue:flights",
        "penstock changes tail queue:flights -n 20",
        "penstock changes tail delta:/data/orders --json",
    ],
)
def tail(
    run: Run,
    feed: FeedArgument,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="COMMIT",
            show_default=False,
            help="The first commit; by default the next one that comes.",
        ),
    ] = None,
    mode: ModeOption = "dropCarryovers",
    updates: UpdatesOption = False,
    rows: Annotated[
        int | None,
        typer.Option("--rows", "-n", metavar="ROWS", min=0, show_default=False, help="Stop after so many."),
    ] = None,
) -> None:
    """Show the changes of a feed as they come, until Ctrl-C or as many as are wanted; nothing is consumed."""
    from penstock.changes.options import COMMIT

    # Of each commit: those of all that has come would depend on when we looked.
    opened = _opened(run, feed)
    stands = opened.newest(opened.oldest()) if start is None else _range(start).start(opened)
    view = _View(run, opened, mode, updates, after=stands, net_window=COMMIT)
    for _ in polls(lambda: view.shown):
        newest = opened.newest(stands)
        if newest > stands:
            view.show(stands, newest, None if rows is None else rows - view.shown)
            stands = newest
        if view.shown == rows:
            return


@command(
    group,
    "lag",
    examples=["penstock changes lag 'postgresql://app@db/shop?publication=orders'"],
)
def lag(run: Run, feed: FeedArgument) -> None:
    """Show how much log a PostgreSQL feed's slot keeps on the server, how much of it has not been read and logged, and which open
    transaction holds it."""
    from penstock.cli.output.protocol import Section
    from penstock.cli.units import size_text
    from penstock.feeds.postgres import PostgresFeed
    from penstock.feeds.urls import parse

    postgres = parse(feed, store=run.url)
    if not isinstance(postgres, PostgresFeed):
        raise InvalidInput("a PostgreSQL feed alone has a slot that may lag behind", condition="NO_LAG")
    found = postgres.lag()
    data = {
        "slot": postgres.slot,
        "retained_bytes": found.retained,
        "unconfirmed_bytes": found.unconfirmed,
        "open_transaction": None if found.open_transaction is None else asdict(found.open_transaction),
    }
    pairs = [
        ("slot", postgres.slot),
        ("kept on the server", size_text(found.retained)),
        ("not read and logged", size_text(found.unconfirmed)),
    ]
    if found.open_transaction is not None:
        pairs.append(("oldest open transaction", found.open_transaction.describe()))
    run.output.describe(data, [Section("", pairs)])


class _View:
    """The changes of a feed on their way to the output."""

    def __init__(
        self, run: Run, feed: OpenChangelog, mode: str, updates: bool, *, after: int, net_window: int
    ) -> None:
        from penstock.changes.options import MODES, one_of

        self._feed = feed
        self._mode = one_of("--mode", mode, MODES, "INVALID_DEDUPLICATION_MODE")
        self._updates, self._net_window = updates, net_window
        self._description = feed.describe(after)
        columns = [name for name in self._description.schema.names if name not in _METADATA]
        self._print: ChangePrinter = run.output.change_printer(columns)
        self.shown = 0

    def show(self, after: int, upto: int, most: int | None) -> None:
        """Show the changes of a range, or no more than so many of them."""
        from penstock.arrow.arrays import first_rows

        tables = self._tables(after, upto) if after < upto else iter(())
        for table in tables if most is None else first_rows(tables, most):
            self._show(table)

    def _tables(self, after: int, upto: int) -> Iterator[pa.Table]:
        from penstock.changes.local import changes

        return changes(
            self._feed,
            after,
            upto,
            mode=self._mode,
            compute_updates=self._updates,
            net_window=self._net_window,
            description=self._description,
        )

    def _show(self, table: pa.Table) -> None:
        from penstock.cli.load.wire import plain_rows

        for first in range(0, table.num_rows, _BLOCK_ROWS):
            self._print(plain_rows(table.slice(first, _BLOCK_ROWS)))
        self.shown += table.num_rows


def _opened(run: Run, url: str) -> OpenChangelog:
    from penstock.feeds.urls import parse

    return parse(url, store=run.url).open()


def _range(start: str | None, end: str | None = None) -> ChangeRange:
    """The bounds that the options give; what is wrong with them is said of the options."""
    from penstock.changes.options import ChangeRange

    try:
        return ChangeRange.of(**_bound("starting", start), **_bound("ending", end))
    except InvalidChangeOption as error:
        told = _BOUND.sub(lambda found: _OPTIONS[found[1]], error.message)
        raise InvalidChangeOption(told, condition=error.condition, **error.parameters) from None


def _bound(which: str, text: str | None) -> dict[str, Any]:
    """A bound as ``changes.read`` has it: digits are a version, anything else is a time."""
    if text is None:
        return {}
    kind = "version" if text.lstrip("-").isdigit() else "timestamp"
    return {f"{which}_{kind}": text}
