"""Commits that Penstock writes to a Delta log itself, since deltalake cannot commit deletion vectors."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyarrow.fs import FileType

from penstock.errors import PenstockError, condition_of
from penstock.lake.new_files import NoConditionalPut, create_if_absent
from penstock.lake.storage import DeltaLocation, import_deltalake
from penstock.tables.delta.log_files import checkpoint_path, commit_path
from penstock.tables.delta.unused_vectors import delete_unused_vectors

if TYPE_CHECKING:
    from deltalake import DeltaTable

log = logging.getLogger("penstock.tables")
Action = dict[str, Any]
_CHECKPOINT_INTERVAL, LOG_CLEANUP = "delta.checkpointInterval", "delta.enableExpiredLogCleanup"
_DEFAULT_CHECKPOINT_INTERVAL = 100


def commit_actions(
    location: DeltaLocation, table: DeltaTable, actions: Sequence[Action], versions: Mapping[str, int]
) -> None:
    """Commit actions on files, with versions of app transactions, to a loaded table.

    Raise deltalake's ``CommitFailedError`` if another writer has committed since the table was loaded.
    """
    version = table.version() + 1
    now = time.time_ns() // 1_000_000
    lines = [_commit_info(table.version(), now), *actions, *_transaction_actions(versions, now)]
    data = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode()
    _require_in_log(location, table.version())
    try:
        created = create_if_absent(location, commit_path(version), data)
    except NoConditionalPut:
        # Callers check `supports_conditional_put` first; if it has changed, this error is translated.
        raise NotImplementedError("its storage does not create a file only if there is none") from None
    if not created:
        raise import_deltalake("deltalake.exceptions").CommitFailedError(
            f"another writer committed version {version}"
        )
    # The driver may also have been suspended just before the write.
    _require_in_log(location, table.version())
    _checkpoint_if_due(location, version, table.metadata().configuration)


def _require_in_log(location: DeltaLocation, version: int) -> None:
    """Refuse to commit after a version that the log no longer has.

    While the driver was suspended, others may have committed and the log been cleaned up, or the table been
    recreated. Then the commit file of the next version may be missing, and readers would ignore a new one.
    """
    infos = location.files().get_file_info([commit_path(version), checkpoint_path(version)])
    if all(info.type != FileType.File for info in infos):
        raise import_deltalake("deltalake.exceptions").CommitFailedError(
            f"the log no longer has version {version}"
        )


def _commit_info(read_version: int, now: int) -> Action:
    # The id makes the bytes of each commit unique.
    return {
        "commitInfo": {
            "timestamp": now,
            "operation": "MERGE",
            "operationParameters": {},
            "readVersion": read_version,
            "isBlindAppend": False,
            "engineInfo": "penstock",
            "txnId": str(uuid.uuid4()),
        }
    }


def _transaction_actions(versions: Mapping[str, int], now: int) -> Iterable[Action]:
    return (
        {"txn": {"appId": app, "version": version, "lastUpdated": now}} for app, version in versions.items()
    )


def _checkpoint_if_due(location: DeltaLocation, version: int, properties: Mapping[str, str | None]) -> None:
    """Write a checkpoint if one is due, as deltalake does after its commits, and delete unused vectors.

    The commit has already succeeded, so errors are only logged.
    """
    try:
        with location.translating_errors():
            if (version + 1) % int(properties.get(_CHECKPOINT_INTERVAL) or _DEFAULT_CHECKPOINT_INTERVAL):
                return
            table = location.open(version)
            table.create_checkpoint()
            if (properties.get(LOG_CLEANUP) or "true").lower() == "true":
                table.cleanup_metadata()
            delete_unused_vectors(location, table)
    except PenstockError as error:
        log.warning(
            "the Delta table %s has no checkpoint of version %d, or keeps unused deletion vectors: %s",
            location.label,
            version,
            error,
            extra={
                "action": "checkpoint_fails",
                "table": location.label,
                "version": version,
                "error": condition_of(error),
            },
        )
