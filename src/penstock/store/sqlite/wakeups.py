"""Bells: small files beside a SQLite file, one for each queue that somebody watches.

To open one for reading and close it again is an event that wakes the watchers of that queue and hardly anybody else, and needs no
right to write. Writes to the SQLite file itself would wake all of them at each commit, and before it can be seen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from penstock.errors import StoreUnsafe
from penstock.store.sqlite.files import READING, StoreFiles
from penstock.store.sqlite.inotify import VISITED, FileEvents

_MOST = 64
"""Files; of more queues some share one."""


def ring(path: str, queue_ids: Iterable[int]) -> None:
    """Wake those who watch these queues; costs next to nothing where nobody ever has.

    Parameters
    ----------
    path
        The SQLite file.
    """
    for queue_id in queue_ids:
        with contextlib.suppress(OSError):
            os.close(os.open(_file(path, queue_id), READING))


def hang(path: str, queue_id: int, files: StoreFiles | None = None) -> FileEvents | None:
    """Hear a queue's bell, which is made if it is not there; None where that cannot be done, or it is somebody else's."""
    folder, name = os.path.split(_file(path, queue_id))
    try:
        os.close((files or StoreFiles(path)).open_beside(_file(path, queue_id)))
        return FileEvents(folder, [name], VISITED)
    except (OSError, StoreUnsafe):
        return None


def _file(path: str, queue_id: int) -> str:
    return f"{path}-bell-{queue_id % _MOST}"
