"""``penstock store``."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.commands.shared import Run, command
from penstock.cli.output.protocol import Section
from penstock.cli.units import age_text, count_text, counted, parse_age, size_text
from penstock.errors import StoreNotFound

group = typer.Typer(help="Make a store, look at it, tidy it up.", no_args_is_help=True, rich_markup_mode=None)


@command(
    group,
    "init",
    examples=[
        "penstock store init",
        "penstock store init --url sqlite:////var/lib/penstock/penstock.db",
        "penstock store init --url 'postgresql://app@db.example/shop?schema=penstock'",
    ],
)
def init(run: Run) -> None:
    """Make a store, or bring one up to date; one that is there keeps what it holds."""
    try:
        run.connect().close()
        created = False
    except StoreNotFound:
        created = True
    with run.connect(create=True) as store:
        data = {"url": store.url, "uuid": store.uuid, "version": store.info().version, "created": created}
        run.output.done(f"{'made' if created else 'there is already'} the store {store.url}", data)


@command(group, "info", examples=["penstock store info --json"])
def info(run: Run) -> None:
    """Show what a store holds."""
    with run.connect() as store:
        found = store.info()
    pairs = [
        ("store", found.url),
        ("uuid", found.uuid),
        ("version", str(found.version)),
        ("queues", count_text(found.queues)),
        ("consumers", count_text(found.consumers)),
        ("rows", count_text(found.rows)),
        ("size", size_text(found.bytes)),
        ("committed batches", count_text(found.commits)),
        ("staged", f"{counted(found.staged_segments, 'segment')}, {size_text(found.staged_bytes)}"),
    ]
    data = {
        "url": found.url,
        "uuid": found.uuid,
        "version": found.version,
        "queues": found.queues,
        "consumers": found.consumers,
        "rows": found.rows,
        "bytes": found.bytes,
        "commits": found.commits,
        "staged_segments": found.staged_segments,
        "staged_bytes": found.staged_bytes,
    }
    run.output.describe(data, [Section("", pairs)])


@command(group, "sweep", examples=["penstock store sweep --older-than 6h"])
def sweep(
    run: Run,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="How long ago it was staged: 1d, 12h, 30min.")
    ] = "1d",
) -> None:
    """Drop what tasks of queries that died have staged and nobody will commit."""
    age = parse_age(older_than, "--older-than")
    with run.connect() as store:
        swept = store.sweep(age)
    text = f"swept {counted(swept, 'segment')} staged more than {age_text(age)} ago"
    run.output.done(text, {"swept_segments": swept, "older_than_seconds": age.total_seconds()})
