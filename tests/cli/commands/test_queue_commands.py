"""``penstock queue`` without the rows: text and JSON, on both kinds of database."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from penstock.arrow.schema import spark_json
from penstock.queue.store import connect
from tests.support.commands import Penstock
from tests.support.raw_sql import run_sql

DDL = "id bigint not null, name string, tags array<struct<a:int not null>>"


def test_create_then_show(penstock: Penstock) -> None:
    made = penstock(
        *("queue", "create", "orders", "--schema", DDL, "--partitions", 3, "--key", "id, name", "--json"),
        *("--retention-rows", "10M", "--retention-age", "7d", "--retention-bytes", "10GB"),
    ).json
    shown = penstock("queue", "show", "orders", "--json").json
    assert made == shown
    assert shown["name"] == "orders"
    assert shown["key"] == ["id", "name"]
    assert shown["retention"] == {"rows": 10_000_000, "age_seconds": 604_800.0, "bytes": 10**10}
    assert shown["ddl"] == "id bigint not null, name string, tags array<struct<a: int not null>>"
    assert [field["name"] for field in shown["schema"]["fields"]] == ["id", "name", "tags"]
    assert [part["partition"] for part in shown["partitions"]] == [0, 1, 2]
    assert shown["created_at"].endswith("Z")
    text = penstock("queue", "show", "orders").out
    for part in (
        "id bigint not null",
        "tags array<struct<a: int not null>>",
        "10,000,000 rows, 7 d, 10.0 GB",
        "id, name",
    ):
        assert part in text


def test_list(penstock: Penstock) -> None:
    assert penstock("queue", "list", "--json").json == {"queues": []}
    assert penstock("queue", "list").out == "no queues\n"
    penstock("queue", "create", "a", "--schema", "id int")
    penstock("queue", "create", "b", "--schema", "id int", "--retention-rows", 5)
    penstock("queue", "put", "a", stdin='{"id": 1}\n{"id": 2}\n')
    found = penstock("queue", "list", "--json").json["queues"]
    assert [(queue["name"], queue["rows"], queue["partitions"]) for queue in found] == [
        ("a", 2, 1),
        ("b", 0, 1),
    ]
    header, first, second = penstock("queue", "list").out.splitlines()
    assert header.split()[:4] == ["queue", "partitions", "rows", "size"]
    assert first.split()[:3] == ["a", "1", "2"]
    assert "5 rows" in second


def test_a_list_has_the_first_queues_and_counts_the_others(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.commands.queue.MAX_LISTED", 2)
    for name in ("c", "a", "b"):
        penstock("queue", "create", name, "--schema", "id int", "--key", "id", "--partitions", 2)
    penstock("consumer", "create", "x")
    penstock("consumer", "register", "x", "a")
    listed = penstock("queue", "list", "--json")
    first, second = listed.json["queues"]
    assert (first["name"], first["consumers"], first["key"], first["partitions"]) == ("a", 1, ["id"], 2)
    assert (second["name"], second["consumers"]) == ("b", 0)
    assert listed.error == {"note": "queues that are not listed: 1. The list has the first ones by name"}
    shown = penstock("queue", "show", "a", "--json").json
    assert first == {name: shown[name] for name in first} | {"consumers": 1, "partitions": 2}


def test_a_queue_that_cannot_be_read_does_not_hide_the_others(penstock: Penstock, store_url: str) -> None:
    for name in ("bad", "good"):
        penstock("queue", "create", name, "--schema", "id int")
    with connect(store_url) as store:
        run_sql(store.database, "update penstock.queue set key_columns = '5' where name = 'bad'")
    listed = penstock("queue", "list")
    assert [line.split()[0] for line in listed.out.splitlines()] == ["queue", "good"]
    assert "cannot be shown" in listed.err


def test_of_very_many_consumers_of_a_queue_the_first_ones_are_shown(
    penstock: Penstock, store_url: str
) -> None:
    penstock("queue", "create", "q", "--schema", "id int")
    with connect(store_url) as store:
        for number in range(103):
            store.create_consumer(f"c{number:03}").register("q")
    text = penstock("queue", "show", "q").out
    assert "c099, and 3 more" in text
    assert "c100" not in text
    assert len(penstock("queue", "show", "q", "--json").json["consumers"]) == 103


def test_add_columns(penstock: Penstock) -> None:
    penstock("queue", "create", "orders", "--schema", "id bigint not null")
    penstock("queue", "put", "orders", stdin='{"id": 1}\n')
    ddl = "note string comment 'what was said', tags array<string>"
    assert penstock("queue", "add-columns", "orders", ddl, "--json").json == {
        "queue": "orders",
        "added": ["note", "tags"],
        "ddl": "id bigint not null, note string comment 'what was said', tags array<string>",
    }
    assert (
        penstock("queue", "add-columns", "orders", ddl).out
        == "queue 'orders' now has 3 columns, none of them new\n"
    )
    assert (
        penstock("queue", "add-columns", "orders", "x int").out
        == "queue 'orders' now has 4 columns, 1 of them new\n"
    )
    penstock("queue", "put", "orders", stdin='{"id": 2, "note": "n", "tags": ["a"]}\n{"id": 3}\n')
    assert penstock("queue", "peek", "orders", "--json").lines == [
        {"id": 1, "note": None, "tags": None, "x": None},
        {"id": 2, "note": "n", "tags": ["a"], "x": None},
        {"id": 3, "note": None, "tags": None, "x": None},
    ]
    assert penstock("queue", "tail", "orders", "-n", 1, "--columns", "x,id", "--json").lines == [
        {"x": None, "id": 3}
    ]
    assert "note string comment 'what was said'" in penstock("queue", "show", "orders").out
    for ddl, condition in [
        ("y int not null", "SCHEMA_MISMATCH.NOT_NULL"),
        ("note int", "SCHEMA_MISMATCH.COLUMN_TYPE"),
        ("y integr", "INVALID_SCHEMA"),
    ]:
        assert penstock("queue", "add-columns", "orders", ddl, "--json", code=1).error["error"] == condition


def test_columns_get_wider_types(penstock: Penstock) -> None:
    penstock("queue", "create", "orders", "--schema", "id int not null comment 'its number', amount float")
    penstock("queue", "put", "orders", stdin='{"id": 1}\n')
    ddl = "id bigint, amount double"
    assert penstock("queue", "widen-columns", "orders", ddl, "--json").json == {
        "queue": "orders",
        "widened": ["id", "amount"],
        "ddl": "id bigint not null comment 'its number', amount double",
    }
    assert (
        penstock("queue", "widen-columns", "orders", ddl).out
        == "queue 'orders' has new types for none of its columns\n"
    )
    penstock("queue", "put", "orders", stdin='{"id": 3000000000, "amount": 0.1}\n')
    assert penstock("queue", "peek", "orders", "--json").lines == [
        {"id": 1, "amount": None},
        {"id": 3000000000, "amount": 0.1},
    ]
    for ddl, condition in [
        ("id string", "SCHEMA_MISMATCH.COLUMN_TYPE"),
        ("other bigint", "SCHEMA_MISMATCH.UNKNOWN_COLUMN"),
        ("id bigintt", "INVALID_SCHEMA"),
    ]:
        assert penstock("queue", "widen-columns", "orders", ddl, "--json", code=1).error["error"] == condition


def test_drop_requires_confirmation(penstock: Penstock) -> None:
    penstock("queue", "create", "q", "--schema", "id int")
    assert penstock("queue", "drop", "q", "--json", code=1).error["error"] == "CONFIRMATION_NEEDED"
    assert "with 0 rows (0 B)? Repeat it with --yes" in penstock("queue", "drop", "q", code=1).err
    assert penstock("queue", "drop", "q", "--yes", "--json").json == {"queue": "q", "dropped_rows": 0}
    assert penstock("queue", "drop", "q", "--yes", "--json", code=1).error["error"] == "QUEUE_NOT_FOUND"


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_drop_asks_for_confirmation_on_a_terminal(
    penstock_sqlite: Penstock, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    penstock_sqlite("queue", "create", "q", "--schema", "id int")
    monkeypatch.setattr("penstock.cli.commands.shared._is_interactive", lambda: True)
    said = penstock_sqlite("queue", "drop", "q", stdin=answer, code=code).err
    assert "Drop queue 'q' with 0 rows (0 B)? [y/N]" in said
    assert ("nothing was done" in said) == (code == 1)
    assert len(penstock_sqlite("queue", "list", "--json").json["queues"]) == code


def test_a_queue_with_a_vital_consumer_is_dropped_only_by_force(penstock: Penstock) -> None:
    penstock("queue", "create", "q", "--schema", "id int")
    penstock("consumer", "create", "c")
    penstock("consumer", "register", "c", "q", "--vital")
    assert penstock("queue", "drop", "q", "--yes", "--json", code=1).error["error"] == "CONSUMER_IN_USE.VITAL"
    penstock("queue", "drop", "q", "--yes", "--force")
    assert penstock("queue", "list", "--json").json == {"queues": []}


def test_trim(penstock: Penstock) -> None:
    penstock("queue", "create", "q", "--schema", "id int")
    penstock("queue", "put", "q", stdin="".join(f'{{"id": {number}}}\n' for number in range(10)))
    assert penstock("queue", "trim", "q", "--json").json == {"queue": "q", "dropped_rows": 0}
    assert "dropped 4 rows of queue 'q'" in penstock("queue", "trim", "q", "--before", 4).out
    assert penstock("queue", "trim", "q", "--before", 6, "--partition", 0, "--json").json["dropped_rows"] == 2
    error = penstock("queue", "trim", "q", "--partition", 1, "--json", code=1).error
    assert (error["error"], error["parameters"]["partition"]) == ("PARTITION_NOT_FOUND", 1)
    assert [row["id"] for row in penstock("queue", "peek", "q", "--json").lines] == [6, 7, 8, 9]


def test_merge(penstock: Penstock) -> None:
    penstock("queue", "create", "q", "--schema", "id int")
    for number in range(5):
        penstock("queue", "put", "q", stdin=f'{{"id": {number}}}')
    assert penstock("queue", "compact", "q", "--json").json == {"queue": "q", "removed_segments": 4}
    assert "queue 'q' has 0 segments fewer" in penstock("queue", "compact", "q").out
    assert penstock("queue", "show", "q", "--json").json["partitions"][0]["segments"] == 1


def test_merge_in_spark(penstock: Penstock, spark: SparkSession) -> None:
    """In the session of this process, as under ``spark-submit``."""
    penstock("queue", "create", "q", "--schema", "id int")
    for number in range(5):
        penstock("queue", "put", "q", stdin=f'{{"id": {number}}}')
    assert penstock("queue", "compact", "q", "--spark", "--json").json["removed_segments"] == 4
    error = penstock("queue", "compact", "absent", "--spark", "--json", code=1).error
    assert error["error"] == "QUEUE_NOT_FOUND"


def test_grow(penstock: Penstock) -> None:
    penstock("queue", "create", "q", "--schema", "id int", "--key", "id")
    assert penstock("queue", "grow", "q", "--by", 3, "--json").json == {"queue": "q", "partitions": 4}
    assert "now has 5 partitions" in penstock("queue", "grow", "q").out
    assert penstock("queue", "grow", "q", "--by", 0, "--json", code=1).error["error"] == "INVALID_INPUT"


def test_retention_is_shown_and_replaced(penstock: Penstock) -> None:
    penstock("queue", "create", "q", "--schema", "id int", "--retention-rows", 5)
    assert "queue 'q' keeps 5 rows" in penstock("queue", "retention", "q").out
    changed = penstock("queue", "retention", "q", "--retention-age", "1d12h", "--json").json
    assert changed == {"queue": "q", "retention": {"rows": None, "age_seconds": 129_600.0, "bytes": None}}
    assert "keeps everything" in penstock("queue", "retention", "q", "--keep-all").out
    both = penstock("queue", "retention", "q", "--keep-all", "--retention-rows", 1, "--json", code=1).error
    assert both["error"] == "INVALID_INPUT"


def test_a_schema_is_read_from_a_file_of_spark_json_or_ddl(penstock_sqlite: Penstock, tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("t", pa.timestamp("us", "UTC"))])
    (tmp_path / "spark.json").write_text("\ufeff" + spark_json(schema))
    (tmp_path / "schema.ddl").write_text("id bigint not null,\n  t timestamp\n")
    for file in ("spark.json", "schema.ddl"):
        made = penstock_sqlite("queue", "create", file, "--schema-file", tmp_path / file, "--json").json
        assert made["ddl"] == "id bigint not null, t timestamp"


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet", "arrow", "ipc", "feather"])
def test_a_schema_is_inferred_from_a_file(penstock_sqlite: Penstock, tmp_path: Path, ending: str) -> None:
    table = pa.table(
        {"id": pa.array([1, 2], pa.int64()), "name": ["x", "y"], "price": [1.5, None], "none": [None, None]}
    )
    path = tmp_path / f"rows.{ending}"
    if ending in ("csv", "tsv"):
        separator = "," if ending == "csv" else "\t"
        lines = [["id", "name", "price", "none"], ["1", "x", "1.5", ""], ["2", "y", "", ""]]
        path.write_text("".join(separator.join(line) + "\n" for line in lines))
    elif ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif ending == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        make = pa.ipc.new_stream if ending == "ipc" else pa.ipc.new_file
        with make(str(path), table.schema) as writer:
            writer.write_table(table)
    made = penstock_sqlite("queue", "create", "q", "--like", path, "--json").json
    assert made["ddl"] == "id bigint, name string, price double, none string"


@pytest.mark.parametrize(
    ("name", "content", "condition"),
    [
        ("missing.csv", None, "FILE_UNREADABLE"),
        ("rows.xlsx", b"x", "INVALID_INPUT"),
        ("rows.csv", b"", "INVALID_SCHEMA"),
        ("rows.csv", b"a,b\n1\n", "INVALID_SCHEMA"),
        ("rows.jsonl", b"null\n", "INVALID_SCHEMA"),
        ("rows.jsonl", b'{"a": \n', "INVALID_SCHEMA"),
        ("rows.parquet", b"no parquet", "INVALID_SCHEMA"),
        ("rows.arrow", b"no arrow", "INVALID_SCHEMA"),
        ("rows.csv", b"a,A\n1,2\n", "SCHEMA_MISMATCH.DUPLICATE_COLUMN"),
    ],
)
def test_a_file_without_a_schema_is_refused(
    penstock_sqlite: Penstock, tmp_path: Path, name: str, content: bytes | None, condition: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    error = penstock_sqlite("queue", "create", "q", "--like", tmp_path / name, "--json", code=1).error
    assert error["error"] == condition
    assert penstock_sqlite("queue", "list", "--json").json == {"queues": []}


@pytest.mark.parametrize(
    ("content", "condition"),
    [
        ("{", "INVALID_SCHEMA"),
        ('{"type": "struct"}', "SCHEMA_MISMATCH.INVALID_SCHEMA"),
        (
            '{"type":"struct","fields":[{"name":"a","type":{"type":"array"}}]}',
            "SCHEMA_MISMATCH.INVALID_SCHEMA",
        ),
    ],
)
def test_an_invalid_schema_file_is_refused(
    penstock_sqlite: Penstock, tmp_path: Path, content: str, condition: str
) -> None:
    (tmp_path / "schema.json").write_text(content)
    error = penstock_sqlite(
        "queue", "create", "q", "--schema-file", tmp_path / "schema.json", "--json", code=1
    ).error
    assert error["error"] == condition


@pytest.mark.parametrize(
    ("words", "condition"),
    [
        ([], "INVALID_INPUT"),
        (["--schema", "id int", "--like", "x.csv"], "INVALID_INPUT"),
        (["--schema", "id bigin"], "INVALID_SCHEMA"),
        (["--schema", "a int, A int"], "SCHEMA_MISMATCH.DUPLICATE_COLUMN"),
        (["--schema", "a char(5)"], "UNSUPPORTED_TYPE"),
        (["--schema", "id int", "--partitions", "0"], "INVALID_INPUT"),
        (["--schema", "id int", "--partitions", "10001"], "INVALID_INPUT"),
        (["--schema", "id int", "--key", "nope"], "SCHEMA_MISMATCH.UNKNOWN_COLUMN"),
        (["--schema", "id int", "--retention-age", "soon"], "INVALID_INPUT"),
        (["--schema", "id int", "--retention-bytes", "much"], "INVALID_INPUT"),
    ],
)
def test_create_refuses_invalid_settings(penstock_sqlite: Penstock, words: list[str], condition: str) -> None:
    error = penstock_sqlite("queue", "create", "q", *words, "--json", code=1).error
    assert error["error"] == condition, error
    assert penstock_sqlite("queue", "list", "--json").json == {"queues": []}


HOSTILE = [
    "it's",
    'say "hi"',
    "../../etc/passwd",
    "a/b\\c",
    "line\nbreak\r\ttab",
    "'; drop table queues; --",
    "[red]bold[/red] :smile:",
    "\x1b[31mred\x1b[0m",
    "مرحبا \u202e reversed",
    "🎈 größe",
    "%s {name} $PATH `id`",
    "   ",
    "x" * 255,
]


def test_any_name_works(penstock: Penstock) -> None:
    for name in HOSTILE:
        penstock("queue", "create", name, "--schema", "`a``b [red]` int")
        penstock("queue", "put", name, stdin='{"a`b [red]": 1}')
        penstock("consumer", "create", name)
        penstock("consumer", "register", name, name)
        assert penstock("consumer", "lag", name, name, "--json").json["lags"][0]["rows"] == 1
        assert penstock("queue", "peek", name, "--json").lines == [{"a`b [red]": 1}]
    assert {queue["name"] for queue in penstock("queue", "list", "--json").json["queues"]} == set(HOSTILE)
    assert {each["queue"] for each in penstock("consumer", "list", "--json").json["consumers"]} == set(
        HOSTILE
    )
    lists = [penstock("queue", "list").out, penstock("consumer", "list").out, penstock("consumer", "lag").out]
    for text in lists:
        assert len(text.splitlines()) == 1 + len(HOSTILE), "a name takes no line of its own"
    for name in HOSTILE:
        lists += [penstock("queue", "show", name).out, penstock("queue", "peek", name).out]
        penstock("queue", "drop", name, "--yes")
    for text in lists:
        assert all(character.isprintable() or character == "\n" for character in text), text


def test_a_name_that_looks_like_an_option_is_given_after_two_dashes(penstock_sqlite: Penstock) -> None:
    penstock_sqlite("queue", "create", "--schema", "id int", "--", "--json")
    assert penstock_sqlite("queue", "list", "--json").json["queues"][0]["name"] == "--json"


@pytest.mark.parametrize("name", ["", "x" * 256, "a\udc80b"])
def test_invalid_names_are_refused(penstock: Penstock, name: str) -> None:
    error = penstock("queue", "create", name, "--schema", "id int", "--json", code=1).error
    assert error["error"] == "INVALID_NAME"


def test_nothing_is_wrapped_or_coloured_in_a_pipe(penstock_sqlite: Penstock) -> None:
    name = "a long name " * 20
    penstock_sqlite("queue", "create", name, "--schema", "id int")
    out = penstock_sqlite("queue", "list").out
    assert "\x1b" not in out
    assert name.strip() in out.splitlines()[1]


def test_a_queue_dropped_during_list_is_left_out(
    penstock_sqlite: Penstock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    penstock_sqlite("queue", "create", "q", "--schema", "id int")
    with connect(f"sqlite:///{tmp_path}/penstock.db") as store:
        monkeypatch.setattr(type(store), "queues", lambda self: ["gone", "q"])
        assert [queue["name"] for queue in penstock_sqlite("queue", "list", "--json").json["queues"]] == ["q"]
