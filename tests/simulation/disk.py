"""In-memory file system for checkpoints. Each operation is a step."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyarrow import fs

from tests.simulation.scheduler import World

UNSYNCED_SECONDS = 30.0
"""After this time the operating system has written a file to the disk even if nobody has synced it."""


class SparkError(Exception):
    """Error with which Spark itself ends a query."""


class LogConflictError(SparkError):
    """CONCURRENT_STREAM_LOG_UPDATE: another driver has written the same entry of the checkpoint."""


@contextmanager
def raise_log_conflicts() -> Iterator[None]:
    """Raise the error that Spark raises when a log file already exists."""
    try:
        yield
    except FileExistsError as error:
        raise LogConflictError(*error.args) from None


class Disk:
    """Files by path."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.files: dict[str, bytes] = {}
        self._unsynced: list[tuple[str, float]] = []
        """The files written since the last sync, with the time of writing, oldest first."""

    def lose_unsynced(self, max_files: int, counted_prefix: str) -> int:
        """Lose some of the newest unsynced files, as a power failure does.

        Return how many of the lost files have a path that starts with ``counted_prefix``.
        """
        recent = [path for path, written in self._unsynced if written > self.world.now - UNSYNCED_SECONDS]
        lost = [path for path in recent[::-1][:max_files] if self.files.pop(path, None) is not None]
        self._unsynced = []
        return sum(path.startswith(counted_prefix) for path in lost)

    def rewind(self, checkpoint: str, last: int, *, committed: bool) -> None:
        """Restore the state that a checkpoint had when ``last`` was its newest entry.

        Parameters
        ----------
        committed
            Whether that entry was already committed.
        """
        for name, newest in (("offsets", last), ("commits", last if committed else last - 1)):
            for number in self.numbers(f"{checkpoint}/{name}"):
                if number > newest:
                    del self.files[f"{checkpoint}/{name}/{number}"]

    # Operations of Spark and of continuous queries.

    def add(self, path: str, text: str) -> None:
        """Create a file as Spark does: it is visible immediately, but a power failure may lose it."""
        with raise_log_conflicts():
            self._put(path, text.encode())
        self._unsynced.append((path, self.world.now))

    def create(self, path: str, content: bytes) -> None:
        """Create a file durably. All files that were written earlier become durable too."""
        self._put(path, content)
        self._unsynced = []

    def replace(self, path: str, content: bytes) -> bool:
        """Replace a file durably, like :meth:`create`."""
        self.world.step(f"replace {path}")
        self.files[path] = content
        self._unsynced = []
        return True

    def _put(self, path: str, content: bytes) -> None:
        self.world.step(f"create {path}")
        if path in self.files:
            raise FileExistsError(path)
        self.files[path] = content

    def read(self, path: str) -> str | None:
        self.world.step(f"read {path}")
        content = self.files.get(path)
        return None if content is None else content.decode()

    def newest(self, folder: str) -> int | None:
        self.world.step(f"list {folder}")
        return max(self.numbers(folder), default=None)

    def numbers(self, folder: str) -> list[int]:
        names = (path.rpartition("/") for path in self.files if path.startswith(f"{folder}/"))
        return [int(name) for parent, _, name in names if parent == folder and name.isdigit()]


class DiskFiles:
    """Replacement for the parts of ``pyarrow.fs.FileSystem`` that the code uses."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def create_dir(self, path: str, recursive: bool = True) -> None:
        """Do nothing: a directory exists when it has files."""

    def get_file_info(self, path_or_selector: Any) -> Any:
        files, step = self._disk.files, self._disk.world.step
        if isinstance(path_or_selector, fs.FileSelector):
            step(f"list {path_or_selector.base_dir}")
            prefix = f"{path_or_selector.base_dir}/"
            paths = [path for path in files if path.startswith(prefix)]
            if not path_or_selector.recursive:
                paths = [path for path in paths if "/" not in path[len(prefix) :]]
            return [_file_info(path, fs.FileType.File) for path in paths]
        step(f"stat {path_or_selector}")
        if path_or_selector in files:
            return _file_info(path_or_selector, fs.FileType.File)
        is_directory = any(path.startswith(f"{path_or_selector}/") for path in files)
        file_type = fs.FileType.Directory if is_directory else fs.FileType.NotFound
        return _file_info(path_or_selector, file_type)

    def open_input_stream(self, path: str) -> io.BytesIO:
        self._disk.world.step(f"read {path}")
        if path not in self._disk.files:
            raise FileNotFoundError(path)
        return io.BytesIO(self._disk.files[path])

    def open_output_stream(self, path: str) -> _OutputFile:
        return _OutputFile(self._disk, path)

    def move(self, source: str, target: str) -> None:
        self._disk.world.step(f"move {source} to {target}")
        if source not in self._disk.files:
            raise FileNotFoundError(source)
        self._disk.files[target] = self._disk.files.pop(source)

    def delete_file(self, path: str) -> None:
        self._disk.world.step(f"delete {path}")
        if self._disk.files.pop(path, None) is None:
            raise FileNotFoundError(path)


class _OutputFile(io.BytesIO):
    """File that appears on the disk when it is closed without an error."""

    def __init__(self, disk: Disk, path: str) -> None:
        super().__init__()
        self._disk, self._path = disk, path

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is None:
            self._disk.world.step(f"write {self._path}")
            self._disk.files[self._path] = self.getvalue()


def _file_info(path: str, file_type: Any) -> fs.FileInfo:
    return fs.FileInfo(path, type=file_type)
