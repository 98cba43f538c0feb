"""Record batches of a task are sent by Spark's Python worker in single writes."""

from __future__ import annotations

import io
from collections.abc import Iterable

import pyarrow as pa

from penstock.continuous.channel import with_whole_batches

BATCHES = [pa.record_batch({"id": [n, None], "name": ["a" * n, "é"], "tags": [[1], []]}) for n in range(3)]


class CountingStream(io.BytesIO):
    """Stream that counts the writes to it."""

    writes = 0

    def write(self, data: object, /) -> int:
        self.writes += 1
        return super().write(data)  # type: ignore[arg-type]  # any buffer that Arrow writes


def serialize(batches: Iterable[pa.RecordBatch]) -> CountingStream:
    """Write batches to a stream as Spark's serializer does."""
    stream, writer = CountingStream(), None
    for batch in batches:
        if writer is None:
            writer = pa.RecordBatchStreamWriter(stream, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()
    return stream


def test_each_batch_is_one_write_of_the_bytes_that_arrow_would_write() -> None:
    default_stream, stream = serialize(BATCHES), serialize(with_whole_batches(iter(BATCHES)))
    assert stream.getvalue() == default_stream.getvalue()
    # The schema and the end of the stream are one write each.
    assert stream.writes == len(BATCHES) + 2 < default_stream.writes / 5


def test_the_next_sender_in_the_same_process_has_the_default_writer() -> None:
    default_writer = pa.RecordBatchStreamWriter
    batches = with_whole_batches(iter(BATCHES))
    next(batches)
    next(batches)
    assert pa.RecordBatchStreamWriter is default_writer
    abandoned = with_whole_batches(iter(BATCHES))
    next(abandoned)
    abandoned.close()
    assert pa.RecordBatchStreamWriter is default_writer
    assert serialize(with_whole_batches(iter([]))).getvalue() == b""
