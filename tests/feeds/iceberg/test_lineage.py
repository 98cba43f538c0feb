"""Rows of tables of format 3 are identified by their row lineage, and deleted by deletion vectors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.changes.passes.passes import Passes
from penstock.changes.passes.rows import ChangeRows, Layout
from penstock.errors import FeedUnavailableError, InvalidChangelogSchemaError
from penstock.feeds.protocol import OpenFeed
from tests.feeds.iceberg.examples import SLOW
from tests.feeds.iceberg.lake import Lake, counted, found, rows
from tests.feeds.iceberg.numbered import HandFile, Numbered, NumberedRow
from tests.support.feed_reading import changes

LAYOUT = Layout(5, 6, 7, row_id=((3,),), data=tuple((place,) for place in range(5)), row_version=(4,))
INHERITED = (None, None)
_VALUES = st.tuples(st.integers(0, 1), st.sampled_from(["p", None]), st.integers(0, 1))


def passed(feed: OpenFeed, after: int, upto: int, rows_per_task: int = 1000) -> dict[int, Counter[object]]:
    """The changes of each version: their type, row id and data."""
    read = changes(feed, after, upto, rows_per_task).combine_chunks()
    kept = Passes(carryovers=True, updates=True).run(ChangeRows(read, LAYOUT)).table
    by_version: dict[int, Counter[object]] = {}
    for row in kept.to_pylist():
        data = (row["id"], row["data"], row["n"])
        of = by_version.setdefault(row["_commit_version"], Counter())
        of[row["_change_type"], row["_row_id"], data] += 1
    return by_version


@dataclass
class Model:
    """The rows that a table holds, by row id, and where they are."""

    table: Numbered
    rows: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Data and the version that last updated it."""
    places: dict[str, dict[int, int]] = field(default_factory=dict)
    """The row ids at the live positions of each file."""

    def expected(self, before: dict[int, tuple[Any, int]]) -> Counter[object]:
        found: Counter[object] = Counter()
        for number in before.keys() | self.rows.keys():
            old, new = before.get(number), self.rows.get(number)
            if old is None and new is not None:
                found["insert", number, new[0]] += 1
            elif new is None and old is not None:
                found["delete", number, old[0]] += 1
            elif old is not None and new is not None and old != new:
                found["update_preimage", number, old[0]] += 1
                found["update_postimage", number, new[0]] += 1
        return found

    def commit(
        self, written: list[NumberedRow], *, stored: bool, removed: list[str], deleted: dict[str, set[int]],
        operation: str, forgetful: bool,
    ) -> None:  # fmt: skip
        """Write rows into a file, remove files, and delete positions of others."""
        new = [self.table.write(*written, stored=stored)] if written else []
        vectors = {path: sorted(self._gone(path) | places) for path, places in deleted.items()}
        new += self.table.vectors(vectors) if vectors else []
        replaced = [f"vectors:{path}" for path in vectors]
        version = self.table.commit(
            *new, removed=[*removed, *replaced], operation=operation, forgetful=forgetful
        )
        for path in removed:
            for number in self.places.pop(path).values():
                del self.rows[number]
        for path, places in deleted.items():
            for place in places:
                del self.rows[self.places[path].pop(place)]
        if written:
            self._place(new[0].path, written, version)

    def _place(self, path: str, written: list[NumberedRow], version: int) -> None:
        (file,) = (each for each in self.table.files if each.path == path)
        assert file.first_row_id is not None
        self.places[path] = {}
        for place, (*data, number, updated) in enumerate(written):
            number = file.first_row_id + place if number is None else number
            self.rows[number] = tuple(data), version if updated is None else updated
            self.places[path][place] = number

    def _gone(self, path: str) -> set[int]:
        (rows,) = (each.rows for each in self.table.files if each.path == path)
        return set(range(rows)) - self.places[path].keys()


def _random_commit(data: st.DataObject, model: Model) -> str:
    """Some rows are kept, some changed, some deleted, and some come."""
    live = {path: list(places.items()) for path, places in model.places.items()}
    ways = ["append", *(["rewrite", "vectors", "compact"] if live else [])]
    way = data.draw(st.sampled_from(ways))
    paths = list(live) if way == "compact" else []
    if way in ("rewrite", "vectors"):
        paths = data.draw(st.lists(st.sampled_from(list(live)), min_size=1, unique=True))
    written: list[NumberedRow] = []
    deleted: dict[str, set[int]] = {}
    for path, (place, number) in ((name, each) for name in paths for each in live[name]):
        values, updated = model.rows[number]
        what = "keep" if way == "compact" else data.draw(st.sampled_from(["keep", "change", "drop"]))
        if what == "change":
            written.append((*data.draw(_VALUES), number, None))
        if what == "keep" and way != "vectors":
            written.append((*values, number, updated))
        if what != "keep" and way == "vectors":
            deleted.setdefault(path, set()).add(place)
    if way != "compact":
        new = data.draw(st.lists(_VALUES, min_size=way == "append", max_size=4))
        for values in new:
            written.insert(data.draw(st.integers(0, len(written))), (*values, *INHERITED))
    model.commit(
        written,
        stored=way != "append",
        removed=[] if way == "vectors" else paths,
        deleted=deleted,
        operation="replace" if way == "compact" else "overwrite",
        forgetful=data.draw(st.booleans()),
    )
    return way


@settings(SLOW, max_examples=12)
@given(data=st.data())
def test_the_changes_of_each_row_follow_its_lineage_in_any_history(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lake = Lake(tmp_path_factory.mktemp("lake"))
    model = Model(Numbered.create(lake))
    expected: dict[int, Counter[object]] = {}
    for _ in range(data.draw(st.integers(2, 6))):
        before = dict(model.rows)
        way = _random_commit(data, model)
        if way == "compact":
            assert model.rows == before
        expected[model.table.version] = model.expected(before)
    feed = lake.feed().open()
    assert feed.oldest() == 0
    rows_per_task = data.draw(st.sampled_from([1, 3, 1000]))
    assert passed(feed, 0, feed.newest(0), rows_per_task) == {
        version: of for version, of in expected.items() if of
    }
    # pyiceberg's own reading of the table says that it was made as it should be.
    held = lake.catalog.load_table("shop.orders").scan().to_arrow()
    assert counted(held) == Counter(values for values, _ in model.rows.values())


def test_a_rewrite_that_keeps_row_ids_gives_updates_without_a_key(lake: Lake) -> None:
    table = Numbered.create(lake)
    first = table.write((7, "a", 0), (7, "a", 0), (7, "b", 0), stored=False)
    table.commit(first)
    second = table.write((7, "changed", 0, 1, None), (7, "b", 0, 2, 1), (7, "new", 0, *INHERITED))
    table.commit(second, removed=[first.path])
    contract = lake.feed().open().describe().contract
    assert contract is not None
    assert (contract.row_id, contract.row_version) == (("_row_id",), "_last_updated_sequence_number")
    assert passed(lake.feed().open(), 1, 2)[2] == Counter(
        {
            ("delete", 0, (7, "a", 0)): 1,
            ("update_preimage", 1, (7, "a", 0)): 1,
            ("update_postimage", 1, (7, "changed", 0)): 1,
            ("insert", 5, (7, "new", 0)): 1,
        }
    )


def test_files_of_one_manifest_have_consecutive_row_ids(lake: Lake) -> None:
    table = Numbered.create(lake)
    files = [table.write(*[(place, "a", 0)] * (place + 2), stored=False) for place in range(3)]
    table.commit(*files)
    table.commit(removed=[files[1].path])
    read = changes(lake.feed().open(), 0, 1)
    assert sorted(zip(read["_row_id"].to_pylist(), read["id"].to_pylist(), strict=True)) == [
        *((number, 0) for number in range(2)),
        *((number, 1) for number in range(2, 5)),
        *((number, 2) for number in range(5, 9)),
    ]
    assert sorted(changes(lake.feed().open(), 1, 2)["_row_id"].to_pylist()) == [2, 3, 4]


def test_selected_columns_are_read_with_and_without_those_of_the_lineage(lake: Lake) -> None:
    table = Numbered.create(lake)
    table.commit(table.write((1, "a", 1, 40, 1), (2, "b", 2, *INHERITED)))
    feed = lake.feed().open()
    full = feed.describe().schema
    for names in (
        ["_row_id"],
        ["n", "_last_updated_sequence_number", "_row_id"],
        ["data"],
        ["_commit_version"],
    ):
        schema = pa.schema([full.field(name) for name in names])
        (batch,) = [batch for task in feed.tasks(0, 1, 10) for batch in feed.read(task, schema)]
        assert batch.schema == schema
        assert batch.num_rows == 2
        if "_row_id" in names:
            assert batch["_row_id"].to_pylist() == [40, 1]


def test_lineage_takes_precedence_over_identifier_fields_but_not_over_the_users_row_id(lake: Lake) -> None:
    made = lake.table()
    with made.update_schema() as update:
        update.set_identifier_fields("id")
    table = Numbered.upgraded(lake, lake.catalog.load_table("shop.orders"))
    table.commit(table.write((1, "a", 1), stored=False))

    def described(**options: object) -> tuple[Any, list[str]]:
        description = lake.feed(**options).open().describe()
        assert description.contract is not None
        return description.contract.row_id, description.schema.names[:-3]

    lineage = ["_row_id", "_last_updated_sequence_number"]
    assert described() == (("_row_id",), ["id", "data", "n", *lineage])
    assert described(row_id="_row_id") == described()
    assert described(row_id="id") == (("id",), ["id", "data", "n"])
    assert found(lake.feed(row_id="id").open(), 0, 1) == Counter([(1, "a", 1, "insert", 1)])


def test_versions_before_format_3_are_read_only_with_a_row_id(
    lake: Lake,
) -> None:
    made = lake.table()
    made.append(rows((1, "a", 1), (2, "b", 2)))
    made.append(rows((3, "c", 3)))
    table = Numbered.upgraded(lake, made)
    assert lake.feed().open().oldest() == 2
    old = next(file for file in table.files if file.rows == 2)
    table.commit(table.write((4, "d", 4), stored=False), removed=[old.path])
    kept = next(file for file in table.files if file.rows == 1 and file.sequence == 2)
    table.commit(table.write((3, "C", 3, kept.first_row_id, None)), removed=[kept.path])

    feed = lake.feed().open()
    assert feed.oldest() == 3
    with pytest.raises(FeedUnavailableError, match="starting_version=4"):
        feed.prepare()
    assert sorted(kind for kind, *_ in passed(feed, 3, 4)[4]) == ["update_postimage", "update_preimage"]
    for after, upto in ((0, 1), (2, 3)):
        with pytest.raises(FeedUnavailableError, match="start from a later version") as error:
            feed.tasks(after, upto, 10)
        assert error.value.condition == "FEED_UNAVAILABLE.NO_ROW_LINEAGE"
    by_id = lake.feed(row_id="id").open()
    assert by_id.prepare() == by_id.oldest() == 0
    assert len(changes(by_id, 0, 4)) == 8


def test_a_column_with_a_lineage_name_is_refused_where_lineage_identifies_rows(lake: Lake) -> None:
    Numbered.upgraded(lake, lake.table(schema=pa.schema([("id", pa.int64()), ("_row_id", pa.int64())])))
    with pytest.raises(InvalidChangelogSchemaError, match="rename the column"):
        lake.feed().open().describe()
    assert lake.feed(row_id="id").open().describe().schema.names[1] == "_row_id"


@pytest.mark.parametrize("place", [5, 20, -1])
def test_a_corrupt_deletion_vector_is_reported(lake: Lake, place: int) -> None:
    table = Numbered.create(lake)
    file = table.write((1, "a", 1), (2, "b", 2), stored=False)
    table.commit(file)
    (vector,) = table.vectors({file.path: [1]})
    _spoil(vector, place)
    table.commit(vector)
    feed = lake.feed().open()
    (task,) = feed.tasks(1, 2, 10)
    with pytest.raises(FeedUnavailableError, match="its magic number or its checksum") as error:
        list(feed.read(task, feed.describe().planned_schema))
    assert error.value.condition == "FEED_UNAVAILABLE.UNREADABLE_FILE"


def _spoil(vector: HandFile, place: int) -> None:
    path = Path(vector.path)
    content = bytearray(path.read_bytes())
    start, length = vector.place
    content[start + place % length] ^= 0xFF
    path.write_bytes(content)


def test_a_file_may_store_lineage_for_only_some_of_its_rows(lake: Lake) -> None:
    table = Numbered.create(lake)
    file = table.write((1, "a", 1, None, 1), (2, "b", 2, 9, None), (3, "c", 3, *INHERITED))
    table.commit(table.write((0, "x", 0), stored=False))
    table.commit(file)
    assert pq.read_table(file.path)["_row_id"].null_count == 2
    read = changes(lake.feed().open(), 1, 2)
    assert read["_row_id"].to_pylist() == [1, 9, 3]
    assert read["_last_updated_sequence_number"].to_pylist() == [1, 2, 2]
