"""Check whether a Delta table still has the commits of a query or an export.

``RESTORE`` undoes commits, but not their app transactions, so undone commits would still count as applied.
The commits in the log tell which version was restored, until they are cleaned up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pyarrow.fs import FileSystem

from penstock.errors import TableRefusedError
from penstock.json_text import parse_json_object
from penstock.lake.storage import DeltaLocation
from penstock.parallel import in_parallel
from penstock.tables.delta.data_files import UnreadableFile
from penstock.tables.delta.log_files import commit_lines, file_actions

if TYPE_CHECKING:
    from deltalake import DeltaTable

_MAX_PARALLEL_READS = 64
FileIdentities = set[tuple[object, ...]]
_KINDS = (b'"commitInfo"', b'"txn"')


@dataclass(frozen=True)
class LoggedCommit:
    """The app transactions of a commit, and the version that it restores, if any."""

    apps: frozenset[str] = frozenset()
    is_restore: bool = False
    restored_version: int | None = None
    """The version that was restored; None if it was selected by a timestamp."""


@dataclass
class RequiredCommits:
    """The commits of a running query or export, all of which the table must keep."""

    location: DeltaLocation
    _last_commits: dict[str, int] = field(default_factory=dict)
    """The version of the last known commit of each app transaction."""
    _commits: dict[int, LoggedCommit | None] = field(default_factory=dict)
    """The commits read from the log, by version; None for commits that have been cleaned up."""

    def require(self, table: DeltaTable, apps: Collection[str]) -> None:
        """Refuse a table that has lost a commit with one of the app transactions."""
        lost = self.last_lost_commit(table, apps)
        if lost is not None:
            raise self._rolled_back_error(lost)

    def last_lost_commit(self, table: DeltaTable, apps: Collection[str]) -> int | None:
        """Return the version of the last lost commit with one of the app transactions, if any is lost."""
        known_apps = set(apps) & self._last_commits.keys()
        present_apps = known_apps | {app for app in apps if self.location.app_version(table, app) is not None}
        last_known = max((self._last_commits[app] for app in known_apps), default=-1)
        if last_known > table.version():
            return last_known
        with self.location.translating_errors():
            app_commits = self._app_commits(table.version(), present_apps)
            ancestors = set(_ancestors(self.location.files(), table.version(), self._commits))
        if lost_commits := app_commits.keys() - ancestors:
            return max(lost_commits)
        for version in sorted(app_commits):
            self._last_commits |= dict.fromkeys(app_commits[version] & present_apps, version)
        oldest = min(self._last_commits.values(), default=0)
        self._commits = {version: commit for version, commit in self._commits.items() if version >= oldest}
        return None

    def _app_commits(self, version: int, apps: set[str]) -> dict[int, frozenset[str]]:
        """Return the commits with the app transactions, back to the last known or else the newest ones."""
        app_commits: dict[int, frozenset[str]] = {}
        unseen_apps = set(apps)
        oldest_known = min(
            (self._last_commits[app] for app in apps if app in self._last_commits), default=version
        )
        for number, commit in self._read_backwards(version) if apps else ():
            if commit is None:
                break
            if commit.apps & apps:
                app_commits[number] = commit.apps
                unseen_apps -= commit.apps
            if not unseen_apps and number <= oldest_known:
                break
        return app_commits

    def _read_backwards(self, version: int) -> Iterator[tuple[int, LoggedCommit | None]]:
        files, size = self.location.files(), 1
        while version >= 0:
            numbers = range(version, max(version - size, -1), -1)
            missing = [number for number in numbers if number not in self._commits]
            self._commits |= zip(missing, in_parallel(partial(_read_commit, files), missing), strict=True)
            yield from ((number, self._commits[number]) for number in numbers)
            version, size = version - size, min(2 * size, _MAX_PARALLEL_READS)

    def _rolled_back_error(self, lost: int) -> TableRefusedError:
        return TableRefusedError(
            f"the Delta table {self.location.label} was restored to a version before {lost}, which Penstock "
            f"committed, or was replaced, and its rows are not written again: restore version {lost}, or "
            "start over with a new checkpoint, after dropping the table if changes are applied to it",
            condition="TABLE_REFUSED.ROLLED_BACK",
            table=self.location.label,
            version=lost,
        )


def _read_commit(files: FileSystem, version: int) -> LoggedCommit | None:
    """Read a commit; return None if the log no longer has it."""
    lines = commit_lines(files, version)
    if lines is None:
        return None
    # Most lines are actions on files: skip parsing them.
    actions = [parse_json_object(line) for line in lines if any(kind in line for kind in _KINDS)]
    apps = frozenset(action["txn"]["appId"] for action in actions if "txn" in action)
    info: dict[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    if info.get("operation") != "RESTORE":
        return LoggedCommit(apps)
    target = str((info.get("operationParameters") or {}).get("version"))
    return LoggedCommit(apps, True, int(target) if target.isdecimal() else None)


def _ancestors(files: FileSystem, version: int, commits: Mapping[int, LoggedCommit | None]) -> Iterator[int]:
    """Yield a version and the versions that it is based on, as far as their commits are known."""
    current: int | None = version
    while current is not None and (commit := commits.get(current)) is not None:
        yield current
        if not commit.is_restore:
            current -= 1
        elif commit.restored_version is not None:
            current = commit.restored_version
        else:
            current = _restored_version(files, current, commits)


def _restored_version(
    files: FileSystem, restored: int, commits: Mapping[int, LoggedCommit | None]
) -> int | None:
    """Return the last version before ``restored`` with the same files; None if it is not in the log."""
    added, removed = _file_changes(files, restored)
    # The files that the version before has in addition to the restored ones, and those that it lacks.
    surplus, missing = removed, added
    version = restored - 1
    while surplus or missing:
        if commits.get(version) is None:
            return None
        added, removed = _file_changes(files, version)
        surplus, missing = (surplus - added) | (removed - missing), (missing - removed) | (added - surplus)
        version -= 1
    return version


def _file_changes(files: FileSystem, version: int) -> tuple[FileIdentities, FileIdentities]:
    """Return the files that a commit adds and removes; another deletion vector makes it another file."""
    try:
        actions = file_actions(files, version)
    except UnreadableFile:
        return set(), set()
    added = {_file_identity(action["add"]) for action in actions if "add" in action}
    return added, {_file_identity(action["remove"]) for action in actions if "remove" in action}


def _file_identity(file: Mapping[str, Any]) -> tuple[object, ...]:
    vector = file.get("deletionVector") or {}
    return file["path"], vector.get("pathOrInlineDv"), vector.get("offset")
