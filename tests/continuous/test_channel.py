"""Batches of a task's generator, as Spark's Python worker sends them."""

from __future__ import annotations

import io
from collections.abc import Iterable

import pyarrow as pa

from penstock.continuous.channel import with_whole_batches

BATCHES = [pa.record_batch({"id": [n, None], "name": ["a" * n, "é"], "tags": [[1], []]}) for n in range(3)]


class Stream(io.BytesIO):
    """Stream that counts the pieces that are written to it."""

    writes = 0

    def write(self, data: object, /) -> int:
        self.writes += 1
        return super().write(data)  # type: ignore[arg-type]  # whatever Arrow writes


def send(batches: Iterable[pa.RecordBatch]) -> Stream:
    """Write batches as Spark's serializer does."""
    stream, writer = Stream(), None
    for batch in batches:
        if writer is None:
            writer = pa.RecordBatchStreamWriter(stream, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()
    return stream


def test_each_batch_is_one_write_of_the_bytes_that_arrow_would_write() -> None:
    usual, whole = send(BATCHES), send(with_whole_batches(iter(BATCHES)))
    assert whole.getvalue() == usual.getvalue()
    # The schema and the end of the stream as well.
    assert whole.writes == len(BATCHES) + 2 < usual.writes / 5


def test_the_next_sender_in_the_same_process_has_the_default_writer() -> None:
    usual = pa.RecordBatchStreamWriter
    sent = with_whole_batches(iter(BATCHES))
    next(sent)
    next(sent)
    assert pa.RecordBatchStreamWriter is usual
    abandoned = with_whole_batches(iter(BATCHES))
    next(abandoned)
    abandoned.close()
    assert pa.RecordBatchStreamWriter is usual
    assert send(with_whole_batches(iter([]))).getvalue() == b""
