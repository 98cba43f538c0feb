"""Every Spark worker pays for imports: neither they nor moving batches may load pandas or Spark."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import pyarrow as pa
from penstock.arrow.key_hash import key_hash
from penstock.arrow.coerce import conform
from penstock.arrow.segments import decode, encode
from penstock.arrow.schema import canonical_schema, schema_to_bytes, spark_json
from penstock.queue.placement import Placement, known_keys_of
from penstock.store.records.queue_columns import QueueColumns

schema = canonical_schema(pa.schema([
    pa.field("id", pa.int64(), nullable=False),
    pa.field("name", pa.string()),
    pa.field("x", pa.float64()),
    pa.field("tags", pa.list_(pa.field("item", pa.map_(pa.string(), pa.int32())))),
]))
spark_json(schema)
ids = pa.Array.from_buffers(pa.int32(), 2, [None, pa.py_buffer(bytes(8))])
names = pa.schema([pa.field("tags", pa.list_(pa.map_(pa.string(), pa.int64()))), pa.field("x", pa.float32())])
for repeats in (1, 100):
    batch = pa.RecordBatch.from_arrays([pa.concat_arrays([ids] * repeats)], names=["ID"])
    for field in names:
        batch = batch.append_column(field, pa.nulls(batch.num_rows, field.type))
    batch = conform(batch, schema)
    assert key_hash(batch, ["id", "name", "x"]).null_count == 0
    assert decode(encode(batch), schema).equals(batch)
    decode(encode(batch), schema, ["name"])
    known = known_keys_of(2, [key_hash(batch, ["id"])])
    columns = QueueColumns(schema_to_bytes(schema))
    assert len(Placement(("id",), 3, columns, (known,)).targets(batch)) == batch.num_rows
found = {"pandas", "pyspark"} & set(sys.modules)
assert not found, found
"""


def test_moving_batches_imports_neither_pandas_nor_spark() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
