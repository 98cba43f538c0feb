"""The library's log while a command runs: warnings as notes, more of it when asked, and as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from penstock.cli.commands.shared import CommandLog, make_output
from tests.support.commands import Penstock, Result

PENSTOCK = logging.getLogger("penstock")


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """Check that the library's log level and handlers have not changed after the test."""
    before = PENSTOCK.level, list(PENSTOCK.handlers)
    yield
    assert (PENSTOCK.level, list(PENSTOCK.handlers)) == before


def records(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.err.splitlines()]


def test_only_warnings_are_logged_by_default(penstock_sqlite: Penstock) -> None:
    assert penstock_sqlite("queue", "create", "orders", "--schema", "id bigint").err == ""


@pytest.mark.parametrize("place", ["before", "behind"])
def test_verbose_logs_events_and_twice_logs_each_step(penstock_sqlite: Penstock, place: str) -> None:
    def run(option: str, *words: str, stdin: str = "") -> str:
        given = (option, *words) if place == "before" else (*words, option)
        return penstock_sqlite(*given, stdin=stdin).err

    created = run("-v", "queue", "create", "orders", "--schema", "id bigint")
    assert created == "info: queue 'orders' is created, with 1 partitions\n"
    assert run("--verbose", "queue", "put", "orders", "-", stdin='{"id": 1}\n') == ""
    assert "debug: 1 rows are appended to queue 'orders'\n" in run(
        "-vv", "queue", "put", "orders", "-", stdin='{"id": 2}\n'
    )


def test_the_json_log_includes_the_fields(penstock_sqlite: Penstock) -> None:
    output = penstock_sqlite("queue", "create", "orders", "--schema", "id bigint", "--log-json", "-v")
    (record,) = records(output)
    assert (record["action"], record["queue"], record["logger"]) == (
        "queue_created",
        "orders",
        "penstock.queue",
    )
    assert "created" in output.out


def test_json_results_can_be_combined_with_log_notes(penstock_sqlite: Penstock) -> None:
    output = penstock_sqlite("queue", "create", "orders", "--schema", "id bigint", "--json", "-v")
    assert output.json
    assert records(output) == [{"note": "info: queue 'orders' is created, with 1 partitions"}]


@pytest.mark.parametrize("as_json", [False, True])
def test_passwords_are_removed_from_every_part_of_a_record(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "postgresql://app:hunter22@host/shop"
    with CommandLog(make_output(url, False), as_json=as_json):
        PENSTOCK.warning(
            "no answer of %s",
            url,
            extra={"action": "store_lost", "store": url, "tried": [url, {url: "hunter22"}]},
        )
    said = capsys.readouterr().err
    assert "no answer of postgresql://app:***@host/shop" in said
    assert "hunter22" not in said
    if as_json:
        assert json.loads(said)["tried"][1] == {"postgresql://app:***@host/shop": "***"}
