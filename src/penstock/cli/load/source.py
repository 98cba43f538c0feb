"""Sources of rows: a file, compressed or not, or standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from penstock.cli.load.schemas import unreadable
from penstock.errors import InvalidInputError

_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv"}
_FIRST_BYTES = 1 << 16


class Source:
    """Bytes to read once, without their byte order mark; bytes that were read too far can be put back."""

    def __init__(self, name: str, stream: BinaryIO, size: int | None) -> None:
        self.name = name
        self.size = size
        """The number of bytes; None when it is not known."""
        self._stream = stream
        self._pending = b""
        first = self.read(_FIRST_BYTES)
        self.put_back(first.removeprefix(_BOM))
        if first[:2] in _WIDE_BOMS:
            encoding = _WIDE_BOMS[first[:2]]
            raise InvalidInputError(
                f"{name} is {encoding}, not UTF-8: convert it with iconv -f {encoding} -t utf-8",
                condition="FILE_UNREADABLE",
            )

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes, fewer only at the end."""
        data, self._pending = self._pending[:size], self._pending[size:]
        if len(data) < size:
            try:
                data += self._stream.read(size - len(data))
            except (OSError, pa.ArrowException, EOFError) as error:
                raise unreadable(self.name, OSError(str(error))) from error
        return data

    def put_back(self, data: bytes) -> None:
        self._pending = data + self._pending

    def format(self, wanted: str) -> str:
        """Return ``jsonl`` or ``csv``: for ``auto`` by the name's ending, or else by the first byte."""
        if wanted != "auto":
            return wanted
        known = _FORMATS.get(Path(_uncompressed(self.name)).suffix.lower())
        if known is not None:
            return known
        first = self.read(_FIRST_BYTES)
        self.put_back(first)
        start = first.lstrip()[:1]
        if start == b"[":
            raise InvalidInputError(
                f"{self.name} is a JSON array: write one object in each line, as `jq -c '.[]'` does",
                value="[",
            )
        return "jsonl" if start == b"{" else "csv"

    def delimiter(self) -> str:
        """Return the character between the columns of a CSV, by the name's ending."""
        return "\t" if _uncompressed(self.name).lower().endswith(".tsv") else ","


def _uncompressed(name: str) -> str:
    return name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in _COMPRESSIONS else name


@contextmanager
def open_source(path: str) -> Iterator[Source]:
    """Open a file, or standard input for ``-``.

    Raises
    ------
    InvalidInputError
        The file cannot be read, or is in UTF-16.
    """
    if path == "-":
        if sys.stdin is None:
            raise InvalidInputError(
                "standard input is closed: name a file, or pipe the rows in", condition="FILE_UNREADABLE"
            )
        yield Source("standard input", sys.stdin.buffer, None)
        return
    compression = _COMPRESSIONS.get(Path(path).suffix.lower())
    with ExitStack() as stack:
        # Only opening is in the block: errors of the source's users pass.
        try:
            if compression:
                stream = stack.enter_context(pa.input_stream(path, compression=compression))
            else:
                stream = stack.enter_context(Path(path).open("rb"))
        except OSError as error:
            raise unreadable(path, error) from error
        yield Source(path, stream, None if compression else os.stat(path).st_size or None)
