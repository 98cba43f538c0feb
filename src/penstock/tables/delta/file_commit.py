"""Commit of data files that tasks wrote, together with the replacements of data files that lose rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.tables.delta.copy_on_write import Replacement
from penstock.tables.delta.data_files import DataFile
from penstock.tables.delta.log_commit import commit_actions
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.transactions import commit_properties

if TYPE_CHECKING:
    from deltalake import DeltaTable


def commit_replacement(
    stage: DeltaStage,
    table: DeltaTable,
    new: Sequence[DataFile],
    replacement: Replacement,
    versions: Mapping[str, int],
) -> int:
    """Commit new files and the replacements of stored ones; return the new version.

    The commit conflicts if the table has changed since it was loaded, because rows that other writers added
    may have the same keys as the new rows.
    """
    version = table.version() + 1
    files = [*new, *replacement.added]
    if stage.is_old:
        # VACUUM may have deleted the files by now, since no version refers to them.
        stage.require_files(files)
        stage.require_vectors(replacement.vectors)
    if replacement.has_vectors:
        actions = [*(file.log_action() for file in files), *replacement.actions()]
        commit_actions(stage.location, table, actions, versions)
        return version
    removed = [file.remove_action() for file in replacement.removed]
    table.create_write_transaction(
        [*(file.add_action() for file in files), *removed],
        "append",
        table.schema(),
        commit_properties=commit_properties(versions, as_loaded=True),
    )
    return version
