"""A run of the demo that ended early is carried on by the next one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_FILE = "demo.json"


@dataclass(frozen=True)
class Begun:
    """What a run has begun, beside its checkpoints.

    Parameters
    ----------
    store
        Its store, without a password.
    until
        Its last simulated hour.
    killed
        The changes that were on the board when the job was killed; None before.
    finished
        Whether the run came to its end.
    """

    store: str
    until: int | None
    killed: int | None = None
    finished: bool = False

    def keep(self, folder: Path) -> Begun:
        """Write it down."""
        there = folder / _FILE
        anew = there.with_suffix(".new")
        anew.write_text(json.dumps(asdict(self)))
        anew.replace(there)
        return self

    def left(self, folder: Path) -> Begun | None:
        """The same run as an earlier process left it; None where there is nothing to carry on."""
        try:
            found = Begun(**json.loads((folder / _FILE).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        same = replace(found, killed=self.killed, finished=self.finished) == self
        return found if same and not found.finished else None
