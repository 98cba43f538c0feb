"""Delta tables with deletion vectors that another writer has committed, and what deltalake reads in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, Schema

from penstock.lake.deletion_vectors import DeletionVector

ENABLED = {"delta.enableDeletionVectors": "true"}


def create(folder: Path, schema: pa.Schema, properties: dict[str, str] = ENABLED) -> DeltaTable:
    return DeltaTable.create(str(folder), Schema.from_arrow(schema), configuration=properties)


def log_of(folder: Path, version: int) -> list[dict[str, Any]]:
    """The actions of a commit."""
    lines = (folder / "_delta_log" / f"{version:020}.json").read_text().splitlines()
    return [json.loads(line) for line in lines]


def added(folder: Path, version: int) -> list[dict[str, Any]]:
    return [action["add"] for action in log_of(folder, version) if "add" in action]


def commit(folder: Path, *actions: dict[str, Any]) -> int:
    """Commit as another program would; there are no others at that moment."""
    version = DeltaTable(str(folder)).version() + 1
    path = folder / "_delta_log" / f"{version:020}.json"
    path.write_text("\n".join(map(json.dumps, [{"commitInfo": {"timestamp": 1}}, *actions])))
    return version


def give_vector(folder: Path, add: dict[str, Any], vector: DeletionVector) -> int:
    """Commit a vector for a file that an action has added; return the version."""
    old = {key: add[key] for key in ("path", "size", "partitionValues", "deletionVector") if add.get(key)}
    removed = {**old, "deletionTimestamp": 1, "dataChange": True, "extendedFileMetadata": True}
    stats = json.dumps({"tightBounds": False, **json.loads(add["stats"])})
    new = {**add, "stats": stats, "deletionVector": vector.action}
    return commit(folder, {"remove": {"partitionValues": {}, **removed}}, {"add": new})


def live(folder: Path) -> list[tuple[Any, ...]]:
    """The rows that deltalake reads, sorted."""
    found = QueryBuilder().register("t", DeltaTable(str(folder))).execute("SELECT * FROM t").read_all()
    return sorted((tuple(row.values()) for row in pa.table(found).to_pylist()), key=repr)


def vectors_of(folder: Path) -> dict[str, DeletionVector]:
    """The vectors of the files that the newest commit has added."""
    adds = added(folder, DeltaTable(str(folder)).version())
    return {add["path"]: DeletionVector.of(add["deletionVector"]) for add in adds if "deletionVector" in add}
