"""The example of docs/how-to/reconcile.md prints what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.support.commands import run_penstock
from tests.support.pages import DOCS, blocks
from tests.support.postgres_source import Source
from tests.support.reconciled import copied_table

_POSITION = re.compile(r"[0-9A-F]+/[0-9A-F]+")


def _plain(text: str) -> list[str]:
    return [_POSITION.sub("POSITION", line).rstrip() for line in text.strip().splitlines()]


def test_the_command_prints_what_the_page_says(source: Source, tmp_path: Path) -> None:
    command, printed, *_ = blocks(DOCS / "how-to/reconcile.md")
    words = shlex.split(command.body.strip().splitlines()[-1])
    table = source.table("id int PRIMARY KEY, customer text, amount numeric(10, 2)", "orders")
    source.run(
        f"INSERT INTO {table} SELECT n, 'customer ' || n % 9, n / 4.0 FROM generate_series(1, 1000) AS n"
    )
    with copied_table(source, table, "sqlite", tmp_path, "orders") as made:
        made.delete("id = 7")
        made.update("amount", "'0.00'", "id = 400")
        words[words.index("--url") + 1] = made.url
        assert words[:2] == ["penstock", "reconcile"]
        words[2] = source.feed(tables=[table]).url
        found = run_penstock(*words[1:], "--settle", "0", code=1)
    assert _plain(found.out) == _plain(printed.body)
