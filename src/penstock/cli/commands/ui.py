"""``penstock ui``: the monitor page, where its extra is installed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli.commands.shared import Run, command
from penstock.extras import load

_MODULE = "penstock.ui.server"


def add_to(group: typer.Typer) -> None:
    """Add the command."""
    examples = [
        "penstock ui",
        "penstock ui --url 'postgresql://app@db/shop' --checkpoint checkpoints/large --port 8090",
        "PENSTOCK_UI_TOKEN=$(openssl rand -hex 16) penstock ui --host 0.0.0.0",
    ]
    command(group, "ui", examples=examples)(ui)


def ui(
    run: Run,
    checkpoints: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="PATH",
            show_default=False,
            help="A query's checkpoint to show besides; may be given several times.",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="0 takes a free one.")
    ] = 8080,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TOKEN",
            envvar="PENSTOCK_UI_TOKEN",
            show_default=False,
            help="What viewers have to know; needed where others than this machine reach the page. Others on the machine see what "
            "is written here: better set the variable.",
        ),
    ] = None,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, max=3600, help="Between two snapshots.")
    ] = 1.0,
) -> None:
    """Serve a page that shows queues, consumers and queries as they are, until Ctrl-C. It only reads.

    The page needs the extra `ui`: pip install 'penstock[ui]'. Prometheus finds metrics at /metrics.
    """

    def ready(address: str) -> None:
        hint = "" if token is None else " (open it once with ?token=… behind it)"
        run.output.done(f"the page is at {address}{hint}", {"address": address})
        # It may go to a file, or a program, which waits for it.
        sys.stdout.flush()

    # By name: the two layers do not know each other.
    load(_MODULE, "serve", "the page")(
        run.url,
        checkpoints=checkpoints or [],
        host=host,
        port=port,
        token=token,
        every=every,
        ready=ready,
    )
