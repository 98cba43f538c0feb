"""Stateful operators of a checkpoint: their files, their parts, and the options with which Spark reads them.

The files are ``state/<operator>/<partition>/[<store>/]<version>.<kind>``. Version N is the state after batch
N - 1. Snapshots of RocksDB share files in ``SSTs/``. An operator's metadata is in ``_metadata/metadata`` or
``_metadata/v2/<batch>``. A stream-stream join keeps its two sides in four stores (formats 1 and 2) or in one
(formats 3 and 4), and each side is a part. For a transformWithState, each variable is a part. Any other
operator has one part, which is its store (Spark 4.2 and 4.3).
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime

from pyarrow import fs

from penstock.json_text import Json, parse_json_object
from penstock.state.logs import CheckpointFiles, Logs, plain_fields, read_logs

HDFS, ROCKSDB = "hdfs", "rocksdb"
JOIN = "symmetricHashJoin"
TIMERS = "timers"
DEFAULT = "default"
_SIDES = ("left", "right")
_CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"


@dataclass(frozen=True)
class StatePart:
    """A part of an operator's state, with one schema: all of the state, a side of a join, or a variable of a
    transformWithState.
    """

    name: str
    """The name to pass as ``part`` to ``penstock.state.read``."""
    kind: str | None = None
    """``ValueState``, ``ListState`` or ``MapState`` for a variable; otherwise None."""
    keys: str | None = None
    """The columns of the key with their types; None if they are unknown or were not read."""
    values: str | None = None
    rows: int | None = None
    """The number of rows after the last committed batch. A list counts as one row."""
    updated: int | None = None
    """Rows that the last committed batch wrote."""
    removed: int | None = None
    """Rows that the last committed batch removed."""

    def to_dict(self) -> Json:
        """Return all fields as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class StateStore:
    """The files of one state store of an operator, in all partitions."""

    name: str
    kind: str | None
    """``hdfs`` or ``rocksdb``, according to the files' names; None if there are no files."""
    partitions: int
    bytes: int
    """The size of all files in bytes, including files of older batches, without checksums and leftovers of
    crashes.
    """
    newest_snapshot: int | None
    """The batch of the newest file that has the whole state of a partition."""
    newest_delta: int | None
    """The batch of the newest file that has the changes of one batch."""
    written_at: datetime | None
    """When the newer of these two files was written, by the file's time."""
    batches_with_changes: frozenset[int] = frozenset()
    """The batches for which every partition has a file of changes."""

    def to_dict(self) -> Json:
        """Return all fields as plain values, for JSON."""
        files = ("partitions", "bytes", "newest_snapshot", "newest_delta", "written_at")
        return plain_fields(self, "name", "kind", *files)


@dataclass(frozen=True)
class StateOperator:
    """One stateful operator of a query."""

    id: int
    name: str | None
    """Spark's name for the operator, such as ``stateStoreSave``; None if the files do not have it."""
    stores: tuple[StateStore, ...]
    parts: tuple[StatePart, ...] = ()
    rows: int | None = None
    """The number of rows in state after the last committed batch, counted as in Spark's progress."""
    updated: int | None = None
    """Rows that the last committed batch wrote."""
    removed: int | None = None
    """Rows that the last committed batch removed."""
    properties: Json = field(default_factory=dict)
    """Spark's properties of the operator: the variables and modes of transformWithState."""
    unknown: tuple[str, ...] = ()
    """What is unknown, and why."""

    @property
    def partitions(self) -> int:
        """The number of partitions that have state."""
        return max((store.partitions for store in self.stores), default=0)

    @property
    def bytes(self) -> int:
        """The size on disk of all stores and all retained batches, in bytes."""
        return sum(store.bytes for store in self.stores)

    @property
    def newest_batch(self) -> int | None:
        """The batch of the state's newest file. It may not be committed."""
        newest = (batch for store in self.stores for batch in (store.newest_snapshot, store.newest_delta))
        return max((batch for batch in newest if batch is not None), default=None)

    @property
    def written_at(self) -> datetime | None:
        """When the newest file of the state was written."""
        return max((store.written_at for store in self.stores if store.written_at), default=None)

    def to_dict(self) -> Json:
        """Return all fields as plain values, for JSON."""
        counts = ("rows", "updated", "removed", "partitions", "bytes", "newest_batch")
        return plain_fields(
            self, "id", "name", *counts, "written_at", "parts", "stores", "properties", "unknown"
        )


@dataclass(frozen=True)
class ReadOptions:
    """The options with which Spark reads a part."""

    store: str
    """The name of the state store that has the part's files."""
    rows: Mapping[str, str]
    changes: Mapping[str, str] | None = None
    """The options with which Spark reads the part's changes; None if Spark cannot read them."""


def parts_of(name: str | None, properties: Json, stores: Iterable[str]) -> tuple[StatePart, ...]:
    """Return the parts of an operator with a name and properties."""
    if has_variables(name):
        kinds = {
            variable["stateName"]: variable.get("stateVariableType")
            for variable in properties.get("stateVariables", [])
        }
        # The names of Spark's own variables, such as that of the timers, begin with a dollar sign.
        variables = [StatePart(name, kind) for name, kind in kinds.items() if not name.startswith("$")]
        has_timers = properties.get("timeMode", "NoTime") != "NoTime"
        return (*variables, StatePart(TIMERS)) if has_timers else tuple(variables)
    if name == JOIN:
        return tuple(map(StatePart, _SIDES))
    return tuple(map(StatePart, sorted(stores)))


def has_variables(operator: str | None) -> bool:
    return (operator or "").startswith("transformWithState")


def is_timers(part: StatePart) -> bool:
    """Return whether a part is the timers, which Spark does not count as rows of the operator."""
    return part.name == TIMERS and part.kind is None


def read_options(operator: StateOperator, part: StatePart) -> ReadOptions:
    """Return the options that read a part."""
    if operator.name == JOIN:
        options = {"joinSide": part.name}
        if operator.properties.get("useVirtualColumnFamilies"):
            return ReadOptions(DEFAULT, options)
        store = f"{part.name}-keyWithIndexToValue"
        return ReadOptions(store, options, {"storeName": store})
    if not has_variables(operator.name):
        options = {"storeName": part.name}
        return ReadOptions(part.name, options, options)
    if is_timers(part):
        return ReadOptions(DEFAULT, {"readRegisteredTimers": "true"})
    options = {"stateVarName": part.name}
    return ReadOptions(DEFAULT, options, options)


def why_no_changes(operator: StateOperator, options: ReadOptions, batch: int) -> str | None:
    """Return why the numbers of rows that a batch wrote and removed are unknown; None if the files show
    them.
    """
    if options.changes is None:
        return "Spark cannot read the changes of a join that keeps both sides in one store"
    stores = [store for store in operator.stores if store.name == options.store]
    if any(batch in store.batches_with_changes for store in stores):
        return None
    if any(store.kind == ROCKSDB for store in stores):
        return f"RocksDB keeps the changes of a batch only with {_CHANGELOG}=true"
    return "the files of the last committed batch's changes are missing"


_STATE = re.compile(
    r"(?P<operator>\d+)/(?P<partition>\d+)/(?:(?!SSTs/)(?P<store>[^/_.][^/]*)/)?(?:SSTs/)?(?P<file>[^/]+)"
)
_VERSION = re.compile(r"(?P<number>\d+)(?:_[0-9A-Fa-f-]+)?\.(?P<kind>delta|snapshot|zip|changelog)")
_KINDS = {"delta": HDFS, "snapshot": HDFS, "zip": ROCKSDB, "changelog": ROCKSDB}
_SNAPSHOTS = {"snapshot", "zip"}


@dataclass(frozen=True)
class Layout:
    """The content of a checkpoint, as far as its files show it without Spark."""

    files: CheckpointFiles
    logs: Logs
    operators: tuple[StateOperator, ...]
    schema_paths: Mapping[int, tuple[str, ...]]
    """The schema files that Spark opens by an absolute path, by operator."""


@dataclass(frozen=True)
class _File:
    partition: int
    info: fs.FileInfo
    batch: int = -1
    kind: str = ""
    """The suffix of the file's name. Empty for a file that snapshots share, which belongs to no batch."""


def read_layout(checkpoint: str | os.PathLike[str]) -> Layout:
    """Read the layout of a checkpoint from its files."""
    files = CheckpointFiles(checkpoint)
    logs = read_logs(files)
    state_files: dict[int, dict[str, list[_File]]] = defaultdict(lambda: defaultdict(list))
    for path, info in files.files_below("state"):
        if match := _STATE.fullmatch(path):
            version = _VERSION.fullmatch(match["file"])
            batch_and_kind = (int(version["number"]) - 1, version["kind"]) if version else ()
            file = _File(int(match["partition"]), info, *batch_and_kind)
            state_files[int(match["operator"])][match["store"] or DEFAULT].append(file)
    operators, paths = [], {}
    for number, stores in sorted(state_files.items()):
        operator, paths[number] = _operator(files, logs, number, stores)
        operators.append(operator)
    return Layout(files, logs, tuple(operators), paths)


def _operator(
    files: CheckpointFiles, logs: Logs, number: int, state_files: Mapping[str, Sequence[_File]]
) -> tuple[StateOperator, tuple[str, ...]]:
    """Describe an operator from its files and its metadata after the last committed batch. Also return the
    paths of its schemas.
    """
    stores = tuple(_store(store, its_files) for store, its_files in sorted(state_files.items()))
    folder = f"state/{number}/_metadata"
    versions = files.numbers(f"{folder}/v2")
    last = logs.committed.id if logs.committed else 0
    applicable = [version for version in versions if version <= last] or versions[:1]
    file = f"{folder}/v2/{applicable[-1]}" if applicable else f"{folder}/metadata"
    try:
        metadata = parse_json_object(files.text(file).partition("\n")[2])
        name = metadata.get("operatorInfo", {}).get("operatorName")
        properties = parse_json_object(metadata.get("operatorPropertiesJson") or "{}")
        infos = metadata.get("stateStoreInfo", [])
        paths = tuple(path for info in infos for path in info.get("stateSchemaFilePaths", []))
        parts = parts_of(name, properties, state_files)
        return StateOperator(number, name, stores, parts, properties=properties), paths
    except ValueError as error:
        reason = str(error)
    except (AttributeError, KeyError, TypeError):
        reason = "it is not in Spark's format"
    unknown = f"its name: the file {file!r} cannot be used ({reason}); Spark writes it from 4.0 on"
    return StateOperator(number, None, stores, parts_of(None, {}, state_files), unknown=(unknown,)), ()


def _store(name: str, files: Sequence[_File]) -> StateStore:
    versions = [file for file in files if file.kind]
    deltas = [file for file in versions if file.kind not in _SNAPSHOTS]
    newest = max((file.batch for file in versions), default=None)
    times = [file.info.mtime for file in versions if file.batch == newest and file.info.mtime is not None]
    changed: dict[int, set[int]] = {file.partition: set() for file in versions}
    for delta in deltas:
        changed[delta.partition].add(delta.batch)
    return StateStore(
        name,
        _KINDS[versions[0].kind] if versions else None,
        len({file.partition for file in files}),
        sum(file.info.size or 0 for file in files),
        max((file.batch for file in versions if file.kind in _SNAPSHOTS), default=None),
        max((file.batch for file in deltas), default=None),
        max(times, default=None),
        frozenset(set.intersection(*changed.values())) if changed else frozenset(),
    )
