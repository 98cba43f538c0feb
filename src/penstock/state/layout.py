"""The state folder of a checkpoint: operators, their stores, and the files of their partitions.

``state/<operator>/<partition>/[<store>/]<version>.<kind>``, where version N is the state after batch N - 1;
snapshots of RocksDB share files in ``SSTs/``. An operator's metadata is in ``_metadata/metadata`` or
``_metadata/v2/<batch>`` (Spark 4.2 and 4.3).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyarrow import fs

from penstock.json_text import Json, parse_json, parse_json_object
from penstock.state.logs import Files, Logs, read_logs
from penstock.state.operators import DEFAULT, HDFS, ROCKSDB, StateOperator, StateStore, parts_of

_STATE = re.compile(
    r"(?P<operator>\d+)/(?P<partition>\d+)/(?:(?!SSTs/)(?P<store>[^/_.][^/]*)/)?(?:SSTs/)?(?P<file>[^/]+)"
)
_VERSION = re.compile(r"(?P<number>\d+)(?:_[0-9A-Fa-f-]+)?\.(?P<kind>delta|snapshot|zip|changelog)")
_KINDS = {"delta": HDFS, "snapshot": HDFS, "zip": ROCKSDB, "changelog": ROCKSDB}
_SNAPSHOTS = {"snapshot", "zip"}


@dataclass(frozen=True)
class Layout:
    """The content of a checkpoint as its files show it, before Spark reads any of it."""

    files: Files
    logs: Logs
    operators: tuple[StateOperator, ...]
    schema_paths: Mapping[int, tuple[str, ...]]
    """By operator, the schema files that Spark opens by an absolute path."""


@dataclass(frozen=True)
class _File:
    """A file of a store."""

    partition: int
    info: fs.FileInfo
    version: re.Match[str] | None
    """None for a file that snapshots share."""

    @property
    def batch(self) -> int:
        assert self.version is not None
        return int(self.version["number"]) - 1

    @property
    def is_snapshot(self) -> bool:
        assert self.version is not None
        return self.version["kind"] in _SNAPSHOTS


def read_layout(files: Files) -> Layout:
    """Read the layout of a checkpoint from its files."""
    logs = read_logs(files)
    state_files: dict[int, dict[str, list[_File]]] = defaultdict(lambda: defaultdict(list))
    for path, info in files.under("state"):
        if match := _STATE.fullmatch(path):
            file = _File(int(match["partition"]), info, _VERSION.fullmatch(match["file"]))
            state_files[int(match["operator"])][match["store"] or DEFAULT].append(file)
    operators, paths = [], {}
    for number, stores in sorted(state_files.items()):
        metadata, unknown = _metadata(files, number, logs)
        operators.append(_operator(number, metadata, stores, unknown))
        paths[number] = tuple(
            path
            for store in metadata.get("stateStoreInfo", [])
            for path in store.get("stateSchemaFilePaths", [])
        )
    return Layout(files, logs, tuple(operators), paths)


def _metadata(files: Files, number: int, logs: Logs) -> tuple[Json, tuple[str, ...]]:
    """Read an operator's metadata as of the last committed batch, and what is missing of it."""
    folder = f"state/{number}/_metadata"
    versions = files.numbers(f"{folder}/v2")
    last = logs.committed.id if logs.committed else 0
    current = [version for version in versions if version <= last] or versions[:1]
    name = f"{folder}/v2/{current[-1]}" if current else f"{folder}/metadata"
    try:
        return parse_json_object(files.text(name).partition("\n")[2]), ()
    except ValueError as error:
        return {}, (f"its name: the file {name!r} cannot be used ({error}); Spark writes it from 4.0 on",)


def _operator(
    number: int,
    metadata: Json,
    state_files: Mapping[str, Sequence[_File]],
    unknown: tuple[str, ...],
) -> StateOperator:
    name = metadata.get("operatorInfo", {}).get("operatorName")
    properties = parse_json(metadata.get("operatorPropertiesJson") or "{}")
    stores = tuple(_store(store, files) for store, files in sorted(state_files.items()))
    parts = parts_of(name, properties, state_files)
    return StateOperator(number, name, stores, parts, properties=properties, unknown=unknown)


def _store(name: str, files: Sequence[_File]) -> StateStore:
    versions = [file for file in files if file.version is not None]
    newest = max((file.batch for file in versions), default=None)
    times = [file.info.mtime for file in versions if file.batch == newest and file.info.mtime is not None]
    return StateStore(
        name,
        next((_KINDS[file.version["kind"]] for file in versions if file.version), None),
        len({file.partition for file in files}),
        sum(file.info.size or 0 for file in files),
        max((file.batch for file in versions if file.is_snapshot), default=None),
        max((file.batch for file in versions if not file.is_snapshot), default=None),
        max(times, default=None),
        _batches_with_changes(versions),
    )


def _batches_with_changes(versions: Sequence[_File]) -> frozenset[int]:
    by_partition: dict[int, set[int]] = {file.partition: set() for file in versions}
    for file in versions:
        if not file.is_snapshot:
            by_partition[file.partition].add(file.batch)
    return frozenset(set.intersection(*by_partition.values())) if by_partition else frozenset()
