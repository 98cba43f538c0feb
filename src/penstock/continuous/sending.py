"""Record batches on their way from a task's Python to the JVM: each in one write.

Spark's Python worker hands each batch to Arrow's stream writer, which writes a batch in some thirty pieces, buffer by buffer. In a
micro-batch a file buffer gathers them; here it is tiny, for rows not to lie in it (``spark.sql.execution.pandas.udf.buffer.size`` is
the size of both directions' buffers), and each piece would be a system call that wakes a thread of the JVM (Spark 4.2, 4.3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import pyarrow as pa

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class WholeWriter:
    """What Spark uses of Arrow's stream writer, and the same bytes; for schemas without dictionaries."""

    def __init__(self, stream: IO[bytes], schema: pa.Schema) -> None:
        self._stream = stream
        stream.write(schema.serialize())

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._stream.write(batch.serialize())

    def close(self) -> None:
        self._stream.write(_END_OF_STREAM)


def in_whole(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same batches, for the end of a task's generator: whoever makes a stream writer for the first one gets a whole one."""
    usual = pa.RecordBatchStreamWriter
    for first in batches:
        pa.RecordBatchStreamWriter = WholeWriter
        try:
            yield first
        finally:
            # The worker's next task has the usual one.
            pa.RecordBatchStreamWriter = usual
        yield from batches
