"""A queue whose rows are in a bucket, on a server with the protocol of S3 whose URL is given."""

from __future__ import annotations

import os
import sys

(endpoint,) = sys.argv[1:]
os.environ |= {
    "AWS_ENDPOINT_URL": endpoint,
    "AWS_ACCESS_KEY_ID": "smoke",
    "AWS_SECRET_ACCESS_KEY": "smoke",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}

import obstore.store  # noqa: E402 - its settings are in the environment
import pyarrow as pa  # noqa: E402

import penstock  # noqa: E402

URL, PAYLOADS = "sqlite:///objects.db", f"s3://smoke/rows-{os.getpid()}"
rows = pa.table({"id": range(2000), "text": [os.urandom(64).hex() for _ in range(2000)]})
bucket = obstore.store.from_url(PAYLOADS, client_options={"allow_http": True})
assert obstore.list(bucket).collect() == []
with penstock.connect(URL) as store:
    clicks = store.create_queue("clicks", rows.schema, key=["id"], partitions=2, payloads=PAYLOADS)
    clicks.append(rows)
    clicks.append([{"id": 2000, "text": "small"}])
objects = obstore.list(bucket).collect()
assert 64 * 2000 < sum(each["size"] for each in objects) < rows.nbytes, objects
with penstock.connect(URL) as store:
    clicks = store.queue("clicks")
    found = pa.concat_tables([clicks.read(partition, 0) for partition in range(2)]).sort_by("id")
    assert found.select(rows.column_names).slice(0, 2000) == rows
    assert found["text"][2000].as_py() == "small"
