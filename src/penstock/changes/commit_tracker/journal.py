"""Journal of a feed's commits in the checkpoint of the query that reads it.

``penstock/changes/<feed>/<micro-batch>.arrow`` holds the commits of a micro-batch and is written before the
micro-batch is committed; ``<micro-batch>.all.arrow`` holds those of all micro-batches up to it.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
from pyarrow import fs

from penstock.arrow.segments import MAX_UNPACKED, kept_table
from penstock.errors import CommitRefused
from penstock.spark.checkpoint import Checkpoint

COMPACT_EVERY = 50
KEEP = 1_000_000
_NAME = re.compile(r"(\d+)(\.all)?\.arrow")


class Journal:
    """The journal of one feed."""

    def __init__(self, checkpoint: Checkpoint, feed: str) -> None:
        self._files, root = checkpoint.files, checkpoint.root
        self._folder = f"{root}/penstock/changes/{feed}"

    def read(self) -> list[tuple[int, pa.Table]]:
        """Read the commits by micro-batch, the oldest first; compacted ones under their last micro-batch."""
        files = self._names()
        compacted = max((batch for batch, is_all in files if is_all), default=-1)
        names = sorted(
            (batch, is_all) for batch, is_all in files if batch > compacted or (is_all and batch == compacted)
        )
        return [(batch, self._load(self._name(batch, is_all=is_all))) for batch, is_all in names]

    def write(self, batch: int, commits: pa.Table) -> None:
        """Write the commits of a micro-batch, replacing earlier ones."""
        self._save(self._name(batch, is_all=False), commits)

    def compact(self, before: int) -> None:
        """Compact the files of earlier micro-batches once there are many."""
        earlier = [(batch, commits) for batch, commits in self.read() if batch < before]
        if len(earlier) < COMPACT_EVERY:
            return
        last = earlier[-1][0]
        compacted = pa.concat_tables(commits for _, commits in earlier)
        self._save(self._name(last, is_all=True), compacted.slice(max(0, compacted.num_rows - KEEP)))
        for batch, is_all in self._names():
            if batch < last or (batch == last and not is_all):
                self._files.delete_file(f"{self._folder}/{self._name(batch, is_all=is_all)}")

    def _names(self) -> list[tuple[int, bool]]:
        selector = fs.FileSelector(self._folder, allow_not_found=True)
        matches = [_NAME.fullmatch(info.base_name) for info in self._files.get_file_info(selector)]
        return [(int(match[1]), match[2] is not None) for match in matches if match is not None]

    def _name(self, batch: int, *, is_all: bool) -> str:
        return f"{batch}{'.all' if is_all else ''}.arrow"

    def _load(self, name: str) -> pa.Table:
        with self._files.open_input_stream(f"{self._folder}/{name}") as stream:
            content = stream.read(MAX_UNPACKED + 1)
        try:
            return kept_table(content)
        except ValueError as error:
            raise CommitRefused(
                f"the checkpoint's file {name} of a feed's commits is damaged ({error}): restore it from a "
                "copy, or start with a new checkpoint",
                file=name,
            ) from error

    def _save(self, name: str, commits: pa.Table) -> None:
        self._files.create_dir(self._folder, recursive=True)
        # Under another name first: a half-written file must not be mistaken for a complete one.
        draft = f"{self._folder}/.{name}.draft"
        with self._files.open_output_stream(draft) as stream:
            stream.write(_serialized(commits))
        self._files.move(draft, f"{self._folder}/{name}")


def _serialized(commits: pa.Table) -> Any:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, commits.schema) as writer:
        writer.write_table(commits)
    return sink.getvalue()
