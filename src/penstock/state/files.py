"""Files of a checkpoint: listed once, read one by one, never written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime

from pyarrow import fs

from penstock.arguments import path_text
from penstock.errors import CheckpointNotFoundError, StateRefusedError
from penstock.spark.checkpoint import Checkpoint, is_batch_number, redact_location, redacted_cause

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_LOGS = {"metadata", "offsets", "commits"}


class Files:
    """The files in a checkpoint at one moment.

    Parameters
    ----------
    location
        A folder, or the URL of one.

    Raises
    ------
    InvalidInputError
        When it is not a path.
    CheckpointNotFoundError
        When it is not a checkpoint.
    StateRefusedError
        When it cannot be reached.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        path = path_text("checkpoint", location)
        self.shown = redact_location(path)
        # Spark's working directory may be another one.
        self.location = path if _SCHEME.match(path) else os.path.abspath(path)
        try:
            self.checkpoint = Checkpoint(self.location)
            kind = self.checkpoint.files.get_file_info(self.checkpoint.root).type
            self._infos = self.checkpoint.tree() if kind == fs.FileType.Directory else {}
        except Exception as error:
            raise self._unreachable(error) from error
        self._require_checkpoint(kind)

    def under(self, folder: str) -> Iterator[tuple[str, fs.FileInfo]]:
        """Return the files below a folder that are not hidden, with their paths from there."""
        for path, info in self._infos.items():
            if path.startswith(f"{folder}/") and info.is_file and not info.base_name.startswith("."):
                yield path.removeprefix(f"{folder}/"), info

    def numbers(self, folder: str) -> tuple[int, ...]:
        """Return the numeric file names in a folder, ascending."""
        return tuple(sorted(int(name) for name, _ in self.under(folder) if is_batch_number(name)))

    def written(self, name: str) -> datetime | None:
        """Return when a file was last written, in UTC."""
        moment: datetime | None = self._infos[name].mtime if name in self._infos else None
        return moment

    def text(self, name: str) -> str:
        """Read a file as text.

        Raises
        ------
        ValueError
            When it is missing, cannot be read or is not text.
        """
        try:
            content = self.checkpoint.read(name)
        except OSError as error:
            raise ValueError(f"it cannot be read: {redacted_cause(error, self.location)}") from error
        if content is None:
            raise ValueError("it is missing")
        return content.decode()

    def _require_checkpoint(self, kind: fs.FileType) -> None:
        if any(path.partition("/")[0] in _LOGS for path in self._infos):
            return
        if kind == fs.FileType.NotFound:
            what = "nothing exists there"
        elif kind != fs.FileType.Directory:
            what = "it is a file"
        else:
            what = "the folder has other files" if self._infos else "the folder is empty"
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {self.shown!r}: {what}. Pass the query's checkpointLocation, the "
            "folder with 'metadata', 'offsets' and 'commits' in it",
            checkpoint=self.shown,
        )

    def _unreachable(self, error: Exception) -> StateRefusedError:
        first = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return StateRefusedError(
            f"the checkpoint at {self.shown!r} cannot be reached from this Python "
            f"({redacted_cause(first, self.location)}): check the address and the credentials; pyarrow and "
            "fsspec know most file systems (pip install fsspec)",
            condition="STATE_REFUSED.UNREACHABLE",
            checkpoint=self.shown,
        )


def may_exist(location: str) -> bool:
    """Whether a path exists, or its existence cannot be checked."""
    try:
        checkpoint = Checkpoint(location)
        return bool(checkpoint.files.get_file_info(checkpoint.root).type != fs.FileType.NotFound)
    except Exception:
        return True
