"""``penstock store``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.commands.shared import Run, command, option
from penstock.cli.output import Section
from penstock.cli.units import age_text, count_text, counted, parse_age, size_text
from penstock.errors import StoreNotFoundError

if TYPE_CHECKING:
    from penstock.store.log.object_check import ObjectsCheck

_MAX_NAMES = 10

group = typer.Typer(help="Create, inspect and clean up a store.", no_args_is_help=True)


@command(
    group,
    "init",
    "penstock store init",
    "penstock store init --url sqlite:////var/lib/penstock/penstock.db",
    "penstock store init --url 'postgresql://app@db.example/shop?schema=penstock'",
)
def init(run: Run) -> None:
    """Create a store; an existing one is left unchanged."""
    try:
        run.connect().close()
        created = False
    except StoreNotFoundError:
        created = True
    with run.connect(create=True) as store:
        data = {"url": store.url, "uuid": store.uuid, "version": store.info().version, "created": created}
        text = f"created the store {store.url}" if created else f"the store {store.url} already exists"
        run.output.done(text, data)


@command(group, "info", "penstock store info --json")
def info(run: Run) -> None:
    """Show what a store holds."""
    with run.connect() as store:
        store_info = store.info()
    pairs = [
        ("store", store_info.url),
        ("uuid", store_info.uuid),
        ("format", f"version {store_info.version}"),
        ("queues", count_text(store_info.queues)),
        ("consumers", count_text(store_info.consumers)),
        ("rows", count_text(store_info.rows)),
        ("size", size_text(store_info.bytes)),
        ("batches committed into it", count_text(store_info.commits)),
        ("staged", f"{counted(store_info.staged_segments, 'segment')}, {size_text(store_info.staged_bytes)}"),
    ]
    run.output.describe(asdict(store_info), [Section("", pairs)])


@command(group, "clean-up", "penstock store clean-up --older-than 6h")
def clean_up(
    run: Run,
    older_than: Annotated[
        str,
        option("--older-than", "AGE", "Delete rows that were staged longer ago than this: 1d, 12h, 30min."),
    ] = "1d",
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Make this database the owner of the objects in object storage; other copies of the store "
            "are refused from then on.",
        ),
    ] = False,
) -> None:
    """Delete staged rows of dead queries, and unused objects.

    Programs that append also do this in the background.
    """
    age = parse_age(older_than, "--older-than")
    with run.connect() as store:
        dropped = store.clean_up(age)
        deleted = store.clean_up_objects(take_over=take_over)
    text = f"dropped {counted(dropped, 'segment')} staged more than {age_text(age)} ago"
    if deleted:
        text += f", and deleted {counted(deleted, 'object')} without rows"
    data = {
        "dropped_segments": dropped,
        "older_than_seconds": age.total_seconds(),
        "deleted_objects": deleted,
    }
    run.output.done(text, data)


@command(group, "check", "penstock store check", "penstock store check --read --json")
def check(
    run: Run,
    read: Annotated[
        bool,
        typer.Option("--read", help="Also read the rows in all objects, and compare their checksums."),
    ] = False,
) -> None:
    """Check that the objects in object storage match the store.

    Only for queues that were created with --payloads. Exits with 1 if an object is missing or damaged, or
    cannot be compared. Without --read, only sizes are compared.
    """
    with run.connect() as store:
        checked = store.check_objects(read=read)
    if not checked:
        run.output.done("no queue keeps rows in object storage", {"queues": []})
        return
    sections = [
        Section(
            f"queue {queue_check.queue}" if queue_check.queue is not None else "a dropped queue",
            _lines(queue_check),
        )
        for queue_check in checked
    ]
    run.output.describe({"queues": [asdict(queue_check) for queue_check in checked]}, sections)
    if any(
        queue_check.missing or queue_check.damaged or queue_check.error is not None for queue_check in checked
    ):
        raise typer.Exit(1)


def _lines(checked: ObjectsCheck) -> list[tuple[str, str]]:
    if checked.error is not None:
        return [("location", checked.location), ("not compared", checked.error)]
    return [
        ("location", checked.location),
        ("objects", f"{count_text(checked.objects)}, {size_text(checked.bytes)}"),
        *([] if checked.read_bytes is None else [("rows as written", size_text(checked.read_bytes))]),
        ("missing", _names(checked.missing)),
        ("damaged", _names(checked.damaged)),
        ("without rows", count_text(checked.unused)),
        ("orphaned", f"{count_text(checked.orphans)}, {size_text(checked.orphan_bytes)}"),
    ]


def _names(objects: list[str]) -> str:
    if len(objects) <= _MAX_NAMES:
        return ", ".join(objects) or "none"
    return f"{', '.join(objects[:_MAX_NAMES])} and {counted(len(objects) - _MAX_NAMES, 'other')}"
