"""A log record as one line of JSON."""

from __future__ import annotations

import json
import logging
import math
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.logs import JsonFormatter


def line(message: str, *arguments: object, **fields: Any) -> dict[str, Any]:
    record = logging.makeLogRecord(
        {"name": "penstock.queue", "levelname": "INFO", "msg": message, "args": arguments, **fields}
    )
    text = JsonFormatter().format(record)
    assert "\n" not in text
    parsed: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return parsed


def test_fields_keep_their_names_and_types() -> None:
    parsed = line("queue %r", "orders", action="appended", queue="orders", rows=5, offsets={0: 7}, error=None)
    assert parsed.pop("at").endswith("Z")
    assert parsed == {
        "level": "INFO",
        "logger": "penstock.queue",
        "message": "queue 'orders'",
        "action": "appended",
        "queue": "orders",
        "rows": 5,
        "offsets": {"0": 7},
        "error": None,
    }


def test_the_time_is_utc() -> None:
    moment = datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)
    assert line("now", created=moment.timestamp())["at"] == "2026-01-31T12:00:00.250000Z"


def test_values_unknown_to_json_become_text_and_non_finite_numbers_null() -> None:
    parsed = line(
        "odd", at=datetime(2026, 1, 1, tzinfo=UTC), sizes={1}, rates=(math.nan, math.inf, 0.5), kind=int
    )
    assert parsed["at"].endswith("Z"), "what the line has of its own stays"
    assert parsed["sizes"] == [1]
    assert parsed["rates"] == [None, None, 0.5]
    assert parsed["kind"] == "<class 'int'>"


def test_an_exception_includes_its_traceback() -> None:
    try:
        raise ValueError("no such thing")
    except ValueError:
        parsed = line("it failed", exc_info=sys.exc_info())
    assert parsed["traceback"].splitlines()[-1] == "ValueError: no such thing"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=8,
)


@given(st.text(st.characters()), st.dictionaries(st.from_regex(r"[a-z_]{1,9}_x", fullmatch=True), _VALUES))
def test_any_record_becomes_one_line_of_json(message: str, fields: dict[str, Any]) -> None:
    parsed = line(message.replace("%", "%%") + "%s", "", **fields)
    assert set(fields) <= set(parsed)
    assert parsed["message"] == message
