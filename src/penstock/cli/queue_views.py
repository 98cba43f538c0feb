"""How queues look, in JSON and in text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.cli.output import Column, Section
from penstock.cli.units import age_text, count_text, size_text
from penstock.instants import moment_text

if TYPE_CHECKING:
    from penstock.queue.info import QueueInfo
    from penstock.queue.maintenance import Retention


def time_text(time: str | None) -> str:
    return "" if time is None else time[:19].replace("T", " ") + "Z"


def retention_json(retention: Retention) -> dict[str, Any]:
    age = None if retention.age is None else retention.age.total_seconds()
    return {"rows": retention.rows, "age_seconds": age, "bytes": retention.bytes}


def retention_text(retention: dict[str, Any]) -> str:
    parts = [
        None if retention["rows"] is None else f"{retention['rows']:,} rows",
        None if retention["age_seconds"] is None else age_text(retention["age_seconds"]),
        None if retention["bytes"] is None else size_text(retention["bytes"]),
    ]
    return ", ".join(part for part in parts if part) or "everything"


def summary(info: QueueInfo) -> dict[str, Any]:
    """A queue in the list of queues."""
    return {
        "name": info.name,
        "partitions": len(info.partitions),
        "rows": info.rows,
        "bytes": info.bytes,
        "key": list(info.key),
        "retention": retention_json(info.retention),
        "consumers": len(info.consumers),
        "created_at": moment_text(info.created_at),
    }


SUMMARY_COLUMNS = (
    Column("name", "queue"),
    Column("partitions", "partitions", count_text, right=True),
    Column("rows", "rows", count_text, right=True),
    Column("bytes", "size", size_text, right=True),
    Column("key", "key", ", ".join),
    Column("retention", "keeps", retention_text),
    Column("consumers", "consumers", count_text, right=True),
    Column("created_at", "created", time_text),
)

PARTITION_COLUMNS = (
    Column("partition", "partition", count_text, right=True),
    Column("first_index", "first", count_text, right=True),
    Column("next_index", "next", count_text, right=True),
    Column("rows", "rows", count_text, right=True),
    Column("bytes", "size", size_text, right=True),
    Column("segments", "segments", count_text, right=True),
    Column("last_append", "last append", time_text),
)


def details(info: QueueInfo) -> dict[str, Any]:
    """Everything about a queue; the schema is Spark's JSON, and its DDL."""
    from penstock.arrow.schema import spark_json
    from penstock.cli.ddl_text import schema_ddl

    return {
        **summary(info),
        "schema": json.loads(spark_json(info.schema)),
        "ddl": ", ".join(schema_ddl(info.schema)),
        "consumers": list(info.consumers),
        "partitions": [
            {
                "partition": each.partition,
                "first_index": each.first_index,
                "next_index": each.next_index,
                "rows": each.rows,
                "bytes": each.bytes,
                "segments": each.segments,
                "last_append": moment_text(each.last_append),
            }
            for each in info.partitions
        ],
    }


def detail_sections(info: QueueInfo) -> list[Section]:
    from penstock.cli.ddl_text import schema_ddl

    data = details(info)
    pairs = [
        ("queue", info.name),
        ("created", time_text(data["created_at"])),
        ("rows", count_text(info.rows)),
        ("size", size_text(info.bytes)),
        ("key", ", ".join(info.key) or "none: rows go to any partition"),
        ("keeps", retention_text(data["retention"])),
        ("consumers", ", ".join(info.consumers) or "none"),
        ("schema", "\n".join(schema_ddl(info.schema))),
    ]
    return [Section("", pairs), Section("", columns=PARTITION_COLUMNS, rows=data["partitions"])]
