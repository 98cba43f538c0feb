"""Results for programs: one JSON document, rows as JSON lines, errors as one line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from penstock.cli.output.protocol import (
    Advance,
    ChangePrinter,
    Column,
    Output,
    RowPrinter,
    Section,
    no_progress,
)
from penstock.errors import PenstockError


class JsonOutput(Output):
    """Keys are never renamed or removed; new ones may be added."""

    def table(self, name: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
        self._print({name: list(rows)})

    def describe(self, data: Mapping[str, Any], sections: Sequence[Section]) -> None:
        self._print(data)

    def done(self, text: str, data: Mapping[str, Any]) -> None:
        self._print(data)

    def _print(self, value: Mapping[str, Any]) -> None:
        print(_dump(value, indent=2))

    def row_printer(self, columns: Sequence[str], *, with_index: bool) -> RowPrinter:
        def show(partition: int, first_index: int, rows: Sequence[Mapping[str, Any]]) -> None:
            for index, row in enumerate(rows, first_index):
                where = {"_partition": partition, "_row_index": index} if with_index else {}
                print(_dump({**row, **where}))
            sys.stdout.flush()

        return show

    def change_printer(self, columns: Sequence[str]) -> ChangePrinter:
        def show(rows: Sequence[Mapping[str, Any]]) -> None:
            for row in rows:
                print(_dump(row))
            sys.stdout.flush()

        return show

    def note(self, text: str) -> None:
        self._complain({"note": text})

    def error(self, error: PenstockError) -> None:
        self._complain({"error": error.condition, "message": error.message, "parameters": error.parameters})

    def _complain(self, value: Mapping[str, Any]) -> None:
        # Before it is dumped: what is struck out must not take the JSON's own quotes with it.
        print(_dump(self.redacted(json.loads(_dump(value))), ascii_only=True), file=sys.stderr)

    def progress(self, text: str, total: int | None) -> AbstractContextManager[Advance]:
        return no_progress()


def _dump(value: Mapping[str, Any], *, indent: int | None = None, ascii_only: bool = False) -> str:
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower()
    return json.dumps(
        value, indent=indent, ensure_ascii=ascii_only or not encoding.startswith("utf"), default=str
    )
