"""The files of checkpoints, in memory: each operation is a step."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyarrow import fs

from tests.simulation.scheduler import World

UNSYNCED_SECONDS = 30.0
"""After so long an operating system has written by itself what was not synced."""


class SparkError(Exception):
    """What Spark itself ends a query with."""


class LogConflictError(SparkError):
    """CONCURRENT_STREAM_LOG_UPDATE: another driver has written the same entry of the checkpoint."""


@contextmanager
def conflicts_told() -> Iterator[None]:
    """What Spark makes of a file that is there already."""
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
        """What was written since the newest file that is on the disk for sure, and when; oldest first."""

    def cut_power(self, lost: int, counted: str) -> int:
        """The machine goes off: at most so many of the newest files that nobody has synced are gone.

        Returns how many of them had a path that begins with ``counted``.
        """
        recent = [path for path, written in self._unsynced if written > self.world.now - UNSYNCED_SECONDS]
        gone = [path for path in recent[::-1][:lost] if self.files.pop(path, None) is not None]
        self._unsynced = []
        return sum(path.startswith(counted) for path in gone)

    def cut(self, checkpoint: str, last: int, *, committed: bool) -> None:
        """Leave of a checkpoint what it was when the entry of this number was the last one.

        That entry was perhaps not committed yet.
        """
        for name, newest in (("offsets", last), ("commits", last if committed else last - 1)):
            for number in self.numbers(f"{checkpoint}/{name}"):
                if number > newest:
                    del self.files[f"{checkpoint}/{name}/{number}"]

    # As Spark uses them.

    def add(self, path: str, text: str) -> None:
        """Write a file that must not be there, as Spark does it.

        It is seen at once, and may be gone after a power cut.
        """
        with conflicts_told():
            self._put(path, text.encode())
        self._unsynced.append((path, self.world.now))

    def create(self, path: str, content: bytes) -> None:
        """Write a file that must not be there, and that stays: with it stays what was written before."""
        self._put(path, content)
        self._unsynced = []

    def replace(self, path: str, content: bytes) -> bool:
        """Write a file in place of another one; it stays as :meth:`create`'s does."""
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
        found = self.files.get(path)
        return None if found is None else found.decode()

    def newest(self, folder: str) -> int | None:
        self.world.step(f"list {folder}")
        return max(self.numbers(folder), default=None)

    def numbers(self, folder: str) -> list[int]:
        names = (path.rpartition("/") for path in self.files if path.startswith(f"{folder}/"))
        return [int(name) for parent, _, name in names if parent == folder and name.isdigit()]


class DiskFiles:
    """A ``pyarrow.fs.FileSystem``, as far as the code uses one."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def create_dir(self, path: str, recursive: bool = True) -> None:
        """Folders are there."""

    def get_file_info(self, wanted: Any) -> Any:
        files, step = self._disk.files, self._disk.world.step
        if isinstance(wanted, fs.FileSelector):
            step(f"list {wanted.base_dir}")
            start = f"{wanted.base_dir}/"
            found = [path for path in files if path.startswith(start)]
            if not wanted.recursive:
                found = [path for path in found if "/" not in path[len(start) :]]
            return [_info(path, fs.FileType.File) for path in found]
        step(f"look {wanted}")
        if wanted in files:
            return _info(wanted, fs.FileType.File)
        folder = any(path.startswith(f"{wanted}/") for path in files)
        return _info(wanted, fs.FileType.Directory if folder else fs.FileType.NotFound)

    def open_input_stream(self, path: str) -> io.BytesIO:
        self._disk.world.step(f"read {path}")
        if path not in self._disk.files:
            raise FileNotFoundError(path)
        return io.BytesIO(self._disk.files[path])

    def open_output_stream(self, path: str) -> _Writing:
        return _Writing(self._disk, path)

    def move(self, source: str, target: str) -> None:
        self._disk.world.step(f"move {source} to {target}")
        if source not in self._disk.files:
            raise FileNotFoundError(source)
        self._disk.files[target] = self._disk.files.pop(source)

    def delete_file(self, path: str) -> None:
        self._disk.world.step(f"delete {path}")
        if self._disk.files.pop(path, None) is None:
            raise FileNotFoundError(path)


class _Writing(io.BytesIO):
    """Seen when it is closed, as a whole."""

    def __init__(self, disk: Disk, path: str) -> None:
        super().__init__()
        self._disk, self._path = disk, path

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._disk.world.step(f"write {self._path}")
            self._disk.files[self._path] = self.getvalue()


def _info(path: str, kind: Any) -> fs.FileInfo:
    return fs.FileInfo(path, type=kind)
