"""Whether the ``RESTORE`` commands in a Delta table's log took back rows of an export.

A ``RESTORE`` keeps the app transactions, which record the positions, so these do not show it. Its commit says
which files the table has again: if those are the files of a version that has the export's last commit,
nothing of the export was taken back, whoever removed what else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyarrow.fs import FileSystem

from penstock.json_text import parse_json_object
from penstock.parallel import in_parallel
from penstock.tables.delta.log_files import commit_path

RESTORE = "RESTORE"
File = tuple[str, str]
"""The path of a data file, and its deletion vector."""


@dataclass(frozen=True)
class Commit:
    version: int
    restores: bool
    exports: bool
    """Whether it is one of the export."""
    removed: Sequence[File] = ()
    added: Sequence[File] = ()


def commits(files: FileSystem, after: int, upto: int, app: str) -> list[Commit]:
    """Return the commits after a version, the oldest first, without those that were deleted from the log.

    A commit with a transaction of ``app`` is one of the export.
    """
    found = in_parallel(lambda version: _commit(files, version, app), range(upto, after, -1))
    gap = found.index(None) if None in found else len(found)
    return [commit for commit in found[:gap] if commit is not None][::-1]


def _commit(files: FileSystem, version: int, app: str) -> Commit | None:
    try:
        with files.open_input_file(commit_path(version)) as file:
            lines = file.readall().splitlines()
    except FileNotFoundError:
        return None
    actions = [parse_json_object(line) for line in lines if line.strip()]
    return Commit(
        version,
        restores=any(info.get("operation") == RESTORE for info in _of(actions, "commitInfo")),
        exports=any(transaction["appId"] == app for transaction in _of(actions, "txn")),
        removed=[_file(file) for file in _of(actions, "remove")],
        added=[_file(file) for file in _of(actions, "add")],
    )


def _of(actions: Iterable[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    return (action[kind] for action in actions if action.get(kind) is not None)


def _file(action: dict[str, Any]) -> File:
    vector = action.get("deletionVector") or {}
    return action["path"], f"{vector.get('pathOrInlineDv', '')}@{vector.get('offset', 0)}"


class _Files:
    """The files of a version, as the difference to those of an earlier one."""

    def __init__(self) -> None:
        self._difference: set[tuple[bool, File]] = set()
        """Files that were added, and those that were removed (False)."""
        self.digest = 0
        """Equal for versions with the same files."""

    def apply(self, commit: Commit) -> None:
        for file in commit.removed:
            self._change((True, file), (False, file))
        for file in commit.added:
            self._change((False, file), (True, file))

    def _change(self, undone: tuple[bool, File], done: tuple[bool, File]) -> None:
        if undone in self._difference:
            self._difference.remove(undone)
            self.digest ^= hash(undone)
        elif done not in self._difference:
            # Some commits add a file that the table has, to say more of it.
            self._difference.add(done)
            self.digest ^= hash(done)


def last_whole(commits: Iterable[Commit], after: int) -> tuple[int, bool]:
    """Return the last version that has all rows of the export, and whether that is the newest one.

    ``commits`` are all after a version that has all rows that were exported until then.
    """
    files = _Files()
    exported = 0
    held: int | None = 0
    # How many commits of the export the versions with some files have; None if rows are missing before them.
    known: dict[int, int | None] = {files.digest: held}
    last, is_whole = after, True
    for commit in commits:
        files.apply(commit)
        if commit.restores:
            held = known.get(files.digest)
        elif commit.exports:
            exported += 1
            held = None if held is None else held + 1
        known[files.digest] = held
        is_whole = held == exported
        last = commit.version if is_whole else last
    return last, is_whole
