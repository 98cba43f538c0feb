"""The files of a checkpoint: listed once, read one by one, never written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime

from pyarrow import fs

from penstock.arguments import path_text
from penstock.errors import CheckpointNotFound, StateRefused
from penstock.spark.checkpoint import Checkpoint, is_batch_number, redact_location, redacted_cause

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_LOGS = {"metadata", "offsets", "commits"}


class Files:
    """What lies in a checkpoint at one moment.

    Parameters
    ----------
    location
        A folder, or the URL of one.

    Raises
    ------
    InvalidInput
        When it is no path.
    CheckpointNotFound
        When it is not a checkpoint.
    StateRefused
        When it cannot be reached.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        given = path_text("checkpoint", location)
        self.shown = redact_location(given)
        # Spark's working folder may be another one.
        self.location = given if _SCHEME.match(given) else os.path.abspath(given)
        try:
            self.checkpoint = Checkpoint(self.location)
            kind = self.checkpoint.files.get_file_info(self.checkpoint.root).type
            self._found = self.checkpoint.tree() if kind == fs.FileType.Directory else {}
        except Exception as error:
            raise self._unreachable(error) from error
        self._require_checkpoint(kind)

    def under(self, folder: str) -> Iterator[tuple[str, fs.FileInfo]]:
        """The files in a folder and in those within it, by their paths from there; none that are hidden."""
        for path, info in self._found.items():
            if path.startswith(f"{folder}/") and info.is_file and not info.base_name.startswith("."):
                yield path.removeprefix(f"{folder}/"), info

    def numbers(self, folder: str) -> tuple[int, ...]:
        """The files right in a folder that numbers are the names of, ascending."""
        return tuple(sorted(int(name) for name, _ in self.under(folder) if is_batch_number(name)))

    def written(self, name: str) -> datetime | None:
        """When a file was last written, in UTC."""
        moment: datetime | None = self._found[name].mtime if name in self._found else None
        return moment

    def text(self, name: str) -> str:
        """The text of a file.

        Raises
        ------
        ValueError
            When it is missing, cannot be read or is no text.
        """
        try:
            found = self.checkpoint.read(name)
        except OSError as error:
            raise ValueError(f"it cannot be read: {redacted_cause(error, self.location)}") from error
        if found is None:
            raise ValueError("it is missing")
        return found.decode()

    def _require_checkpoint(self, kind: fs.FileType) -> None:
        if any(path.partition("/")[0] in _LOGS for path in self._found):
            return
        if kind == fs.FileType.NotFound:
            what = "nothing is there"
        elif kind != fs.FileType.Directory:
            what = "it is a file"
        else:
            what = "it is a folder with other things in it" if self._found else "the folder is empty"
        raise CheckpointNotFound(
            f"there is no checkpoint at {self.shown!r}: {what}. Give the folder that the query has as checkpointLocation, the one with "
            "'metadata', 'offsets' and 'commits' in it",
            checkpoint=self.shown,
        )

    def _unreachable(self, error: Exception) -> StateRefused:
        first = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return StateRefused(
            f"the checkpoint at {self.shown!r} cannot be reached from this Python ({redacted_cause(first, self.location)}): "
            "check the address and the credentials; pyarrow and fsspec know most file systems (pip install fsspec)",
            condition="STATE_REFUSED.UNREACHABLE",
            checkpoint=self.shown,
        )


def is_there(location: str) -> bool:
    """Whether there is something at a path; also where that cannot be found out."""
    try:
        found = Checkpoint(location)
        return bool(found.files.get_file_info(found.root).type != fs.FileType.NotFound)
    except Exception:
        return True
