"""Reader for the add actions of a Delta table's version, with all fields of the log.

deltalake does not return deletion vectors, and a commit that replaces a vector must repeat the vector and the
statistics unchanged. So the last checkpoint and the commits after it are read here as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileSystem

from penstock.json_text import parse_json_object
from penstock.lake.storage import DeltaLocation
from penstock.parallel import in_parallel
from penstock.tables.delta.data_files import UnreadableFile

LOG_FOLDER = "_delta_log"
_LAST_CHECKPOINT = f"{LOG_FOLDER}/_last_checkpoint"
_CHECKPOINT_NAME = re.compile(r"(\d{20})\.checkpoint\.parquet")
_MAP_FIELDS = ("partitionValues", "tags")
_ADD_FIELDS = (
    *("path", "partitionValues", "size", "modificationTime", "dataChange", "stats", "tags", "deletionVector"),
    *("baseRowId", "defaultRowCommitVersion", "clusteringProvider"),
)
"""The fields of an add action. Checkpoints repeat some in other columns, such as ``stats_parsed``."""
Actions = dict[str, dict[str, Any]]


def adds_in_log(location: DeltaLocation, version: int, paths: Collection[str]) -> Actions:
    """Return the add actions of the given files of a version, by their paths as written in the log.

    Raises
    ------
    UnreadableFile
        When the log has a format that is not supported here.
    """
    files = location.files()
    checkpoint = _last_checkpoint(files)
    if checkpoint > version:
        checkpoint = _checkpoint_before(files, version)
    commits = in_parallel(lambda number: file_actions(files, number), range(checkpoint + 1, version + 1))
    wanted = set(paths)
    adds = _adds_in_checkpoint(files, checkpoint, wanted) if checkpoint >= 0 else {}
    for actions in commits:
        _replay(actions, wanted, adds)
    if adds.keys() != wanted:
        raise UnreadableFile
    return adds


def commit_path(version: int) -> str:
    """Return the path of a commit in the table's folder."""
    return f"{LOG_FOLDER}/{version:020}.json"


def checkpoint_path(version: int) -> str:
    """Return the path of a checkpoint in the table's folder."""
    return f"{LOG_FOLDER}/{version:020}.checkpoint.parquet"


def _last_checkpoint(files: FileSystem) -> int:
    """Return the version of the last checkpoint; -1 if there is none."""
    try:
        with files.open_input_file(_LAST_CHECKPOINT) as file:
            last = parse_json_object(file.readall())
    except FileNotFoundError:
        return -1
    if last.get("parts") or last.get("v2Checkpoint"):
        raise UnreadableFile
    return int(last["version"])


def _checkpoint_before(files: FileSystem, version: int) -> int:
    """Return the version of the last checkpoint up to a version; -1 if there is none."""
    infos = files.get_file_info(FileSelector(LOG_FOLDER))
    names = (_CHECKPOINT_NAME.fullmatch(info.base_name) for info in infos)
    return max((int(match[1]) for match in names if match and int(match[1]) <= version), default=-1)


def _adds_in_checkpoint(files: FileSystem, version: int, paths: set[str]) -> Actions:
    try:
        with files.open_input_file(checkpoint_path(version)) as file:
            parquet = pq.ParquetFile(file)
            names = [name for name in ("add", "sidecar") if name in parquet.schema_arrow.names]
            adds: Actions = {}
            for batch in parquet.iter_batches(columns=names):
                if "sidecar" in names and batch.column("sidecar").null_count < batch.num_rows:
                    # The actions are in other files.
                    raise UnreadableFile
                adds |= {add["path"]: add for add in _select_adds(batch.column("add"), paths)}
            return adds
    except FileNotFoundError:
        raise UnreadableFile from None


def _select_adds(adds: pa.StructArray, paths: set[str]) -> Iterator[dict[str, Any]]:
    path_array = pa.array(sorted(paths), pa.string())
    is_selected = pc.is_in(pc.struct_field(adds, "path").cast(pa.string()), value_set=path_array)
    for add in adds.filter(is_selected).to_pylist():
        maps = {name: dict(add[name]) for name in _MAP_FIELDS if add.get(name) is not None}
        fields = add | maps
        yield {name: fields[name] for name in _ADD_FIELDS if fields.get(name) is not None}


def commit_lines(files: FileSystem, version: int) -> list[bytes] | None:
    """Return the actions of a commit, each as JSON; None if the log does not have it."""
    try:
        with files.open_input_file(commit_path(version)) as file:
            return list(file.readall().splitlines())
    except FileNotFoundError:
        return None


def file_actions(files: FileSystem, version: int) -> list[dict[str, Any]]:
    """Return the actions of a commit on files; raise :class:`UnreadableFile` if the log does not have it."""
    lines = commit_lines(files, version)
    if lines is None:
        raise UnreadableFile
    # Most lines are adds or removes.
    actions = map(parse_json_object, filter(bytes.strip, lines))
    return [action for action in actions if "add" in action or "remove" in action]


def _replay(actions: list[dict[str, Any]], paths: set[str], adds: Actions) -> None:
    """Apply a commit's actions: removals first, then additions."""
    for action in actions:
        if "remove" in action:
            adds.pop(action["remove"]["path"], None)
    for action in actions:
        if "add" in action and action["add"]["path"] in paths:
            add = action["add"]
            adds[add["path"]] = {name: value for name, value in add.items() if value is not None}
