"""``penstock ui``: the monitor page, where its extra is installed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli.commands.shared import Run, command
from penstock.extras import load


def add_to(group: typer.Typer) -> None:
    command(
        group,
        "ui",
        "penstock ui",
        "penstock ui --url 'postgresql://app@db/shop' --checkpoint checkpoints/large --port 8090",
        "PENSTOCK_UI_TOKEN=$(openssl rand -hex 16) penstock ui --host 0.0.0.0",
    )(ui)


def ui(
    run: Run,
    checkpoints: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint", metavar="PATH", help="Also show this query's checkpoint; can be repeated."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="0 takes a free one.")
    ] = 8080,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="TOKEN",
            envvar="PENSTOCK_UI_TOKEN",
            help="The secret that viewers need; required where other machines can reach the page. "
            "Other users of this machine can see a command line, so set the variable instead.",
        ),
    ] = None,
    every: Annotated[
        float,
        typer.Option("--every", metavar="SECONDS", min=0.1, max=3600, help="The time between two snapshots."),
    ] = 1.0,
) -> None:
    """Serve a page that shows queues, consumers and queries as they are, until Ctrl-C. It only reads.

    The page needs the extra `ui`: pip install 'penstock-spark[ui]'. Prometheus finds metrics at /metrics.
    """

    def ready(address: str) -> None:
        hint = "" if token is None else " (open it once with ?token=… appended)"
        run.output.done(f"the page is at {address}{hint}", {"address": address})
        # A program that waits for the address may read the output.
        sys.stdout.flush()

    # By name, since neither layer imports the other.
    serve = load("penstock.ui.server", "serve", "the page")
    serve(
        run.url,
        checkpoints=checkpoints or [],
        host=host,
        port=port,
        token=token,
        every=every,
        ready=ready,
    )
