"""Reading files (compressed or not) and standard input, and schemas of new queues from DDL or such files."""

from __future__ import annotations

import json
import os
import sys
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from penstock.arguments import in_quotes
from penstock.arrow.schema import canonical_schema
from penstock.cli.ddl import parse_ddl
from penstock.errors import InvalidInputError

SAMPLE_BYTES = 16 << 20


def choose_schema(ddl: str | None, file: Path | None, like: Path | None) -> pa.Schema:
    """Return the canonical schema from the one source that is not None."""
    match ddl, file, like:
        case str(), None, None:
            return canonical_schema(parse_ddl(ddl))
        case None, Path(), None:
            return _schema_from_file(file)
        case None, None, Path():
            return infer_schema(like)
    raise InvalidInputError("a schema comes from one of --schema, --schema-file and --like: give exactly one")


def _schema_from_file(path: Path) -> pa.Schema:
    """Read a schema from a file with Spark's schema JSON or DDL."""
    text = read_bytes(path).decode("utf-8-sig", errors="replace").strip()
    if not text.startswith("{"):
        return canonical_schema(parse_ddl(text))
    try:
        return canonical_schema(json.loads(text))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidInputError(
            f"{in_quotes(str(path))} is not a schema in Spark's JSON ({error}); write what "
            "StructType.json() returns",
            condition="INVALID_SCHEMA",
            file=str(path),
        ) from error


def read_bytes(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise unreadable(str(path), error) from error


def unreadable(path: str, error: OSError) -> InvalidInputError:
    return InvalidInputError(
        f"cannot read {in_quotes(path)}: {error.strerror or error}", condition="FILE_UNREADABLE", file=path
    )


def infer_schema(path: Path) -> pa.Schema:
    """Return the canonical schema of a CSV, JSON lines, Parquet or Arrow file.

    For a text file, only the first 16 MB are read; a column without a value there becomes a string. Every
    column is nullable.
    """
    readers = {
        ".csv": _csv_schema,
        ".tsv": _csv_schema,
        ".jsonl": _json_schema,
        ".ndjson": _json_schema,
        ".json": _json_schema,
        ".parquet": _parquet_schema,
        ".arrow": _arrow_schema,
        ".feather": _arrow_schema,
        ".ipc": _arrow_schema,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InvalidInputError(
            f"--like needs a file's ending, one of {', '.join(readers)}, not {in_quotes(path.suffix)}",
            file=str(path),
        )
    try:
        inferred = reader(path)
    except OSError as error:
        raise unreadable(str(path), error) from error
    except pa.ArrowException as error:
        raise InvalidInputError(
            f"cannot infer the schema of {in_quotes(str(path))}: {error}",
            condition="INVALID_SCHEMA",
            file=str(path),
        ) from error
    return canonical_schema(pa.schema([_unknown_to_string(field) for field in inferred]))


def _unknown_to_string(field: pa.Field) -> pa.Field:
    """Replace types that are unknown, because there are no values, with string."""
    kind = field.type
    if pa.types.is_null(kind):
        return field.with_type(pa.string())
    if pa.types.is_list(kind):
        return field.with_type(pa.list_(_unknown_to_string(kind.value_field)))
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_unknown_to_string(inner) for inner in kind]))
    return field


def _sample(path: Path) -> pa.BufferReader:
    data = read_bytes(path, SAMPLE_BYTES)
    if len(data) == SAMPLE_BYTES:
        data = data[: data.rfind(b"\n") + 1] or data
    return pa.BufferReader(data)


def _csv_schema(path: Path) -> pa.Schema:
    import pyarrow.csv

    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    return pyarrow.csv.read_csv(
        _sample(path),
        read_options=pyarrow.csv.ReadOptions(block_size=SAMPLE_BYTES),
        parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
    ).schema


def _json_schema(path: Path) -> pa.Schema:
    import pyarrow.json

    sample = _sample(path)
    # Arrow's reader crashes on a line that is not an object.
    if any(line.strip()[:1] not in (b"", b"{") for line in sample.read_buffer().to_pybytes().splitlines()):
        raise InvalidInputError(
            f"{in_quotes(str(path))} is not a file of JSON lines: write one object in each line",
            condition="INVALID_SCHEMA",
        )
    sample.seek(0)
    return pyarrow.json.read_json(
        sample, read_options=pyarrow.json.ReadOptions(block_size=SAMPLE_BYTES)
    ).schema


def _parquet_schema(path: Path) -> pa.Schema:
    import pyarrow.parquet

    return pyarrow.parquet.read_schema(path)


def _arrow_schema(path: Path) -> pa.Schema:
    with pa.OSFile(str(path), "rb") as file:
        try:
            return pa.ipc.open_file(file).schema
        except pa.ArrowInvalid:
            file.seek(0)
            return pa.ipc.open_stream(file).schema


_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv"}
_HEAD_BYTES = 1 << 16


class Source:
    """Input that is read once, without its byte order mark. Bytes can be put back."""

    def __init__(self, name: str, stream: BinaryIO, size: int | None) -> None:
        self.name = name
        self.size = size
        """The number of bytes; None if unknown."""
        self._stream = stream
        self._pending = b""
        head = self.read(_HEAD_BYTES)
        self.put_back(head.removeprefix(BOM_UTF8))
        if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise InvalidInputError(
                f"{name} is utf-16, not UTF-8: convert it with iconv -f utf-16 -t utf-8",
                condition="FILE_UNREADABLE",
            )

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes; fewer only at the end."""
        data, self._pending = self._pending[:size], self._pending[size:]
        if len(data) < size:
            try:
                data += self._stream.read(size - len(data))
            except (OSError, pa.ArrowException, EOFError) as error:
                raise unreadable(self.name, OSError(str(error))) from error
        return data

    def put_back(self, data: bytes) -> None:
        self._pending = data + self._pending

    def format(self, requested: str) -> str:
        """Return ``jsonl`` or ``csv``; for ``auto``, by the file's suffix, or else by the first byte."""
        if requested != "auto":
            return requested
        by_suffix = _FORMATS.get(Path(_uncompressed(self.name)).suffix.lower())
        if by_suffix is not None:
            return by_suffix
        head = self.read(_HEAD_BYTES)
        self.put_back(head)
        first_byte = head.lstrip()[:1]
        if first_byte == b"[":
            raise InvalidInputError(
                f"{self.name} is a JSON array: write one object in each line, as `jq -c '.[]'` does",
                value="[",
            )
        return "jsonl" if first_byte == b"{" else "csv"

    def delimiter(self) -> str:
        """Return the delimiter of a CSV file, by its suffix."""
        return "\t" if _uncompressed(self.name).lower().endswith(".tsv") else ","


def _uncompressed(name: str) -> str:
    return name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in _COMPRESSIONS else name


@contextmanager
def open_source(path: str) -> Iterator[Source]:
    if path == "-":
        if sys.stdin is None:
            raise InvalidInputError(
                "standard input is closed: name a file, or pipe the rows in", condition="FILE_UNREADABLE"
            )
        yield Source("standard input", sys.stdin.buffer, None)
        return
    compression = _COMPRESSIONS.get(Path(path).suffix.lower())
    with ExitStack() as stack:
        # Only opening is in this block, so that errors of the source's users are not caught.
        try:
            if compression:
                stream = stack.enter_context(pa.input_stream(path, compression=compression))
            else:
                stream = stack.enter_context(Path(path).open("rb"))
        except OSError as error:
            raise unreadable(path, error) from error
        yield Source(path, stream, None if compression else os.stat(path).st_size or None)
