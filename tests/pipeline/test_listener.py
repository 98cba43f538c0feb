"""Events of a session's queries, and the publishers to which they are passed on."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest

from penstock.json_text import Json
from penstock.pipeline.monitor import SessionListener


def progress_of(run_id: str, batch: int) -> Json:
    return {"runId": run_id, "batchId": batch}


def heard(publisher: Mock) -> list[tuple[str, str]]:
    """Return the calls of a publisher, and their runs."""
    return [
        (call[0], call.args[0].run_id if call[0] == "begin" else call.args[0])
        for call in publisher.method_calls
    ]


@pytest.fixture
def own() -> Mock:
    return Mock(secrets=[])


@pytest.fixture
def others() -> Mock:
    return Mock(secrets=[])


@pytest.fixture
def hearing(others: Mock) -> SessionListener:
    found = SessionListener()
    found.is_registered = True
    found.set_default_publisher(others, "http://127.0.0.1:4040")
    return found


def test_events_are_held_until_the_owner_of_their_run_is_known(
    hearing: SessionListener, own: Mock, others: Mock
) -> None:
    with hearing.starting():
        for run_id in ("own", "stranger"):
            hearing.started("id", run_id, "n")
            hearing.progressed(progress_of(run_id, 0))
            hearing.terminated(run_id, None, None)
        assert own.method_calls == others.method_calls == []
        hearing.claim("own", own)
    assert heard(own) == [("progressed", "own"), ("end", "own")]
    assert heard(others) == [("begin", "stranger"), ("progressed", "stranger"), ("end", "stranger")]
    (run,) = others.begin.call_args.args
    assert (run.query_id, run.name, run.spark_ui) == ("id", "n", "http://127.0.0.1:4040")


def test_a_run_claimed_without_a_publisher_is_not_reported(hearing: SessionListener, others: Mock) -> None:
    hearing.claim("continuous", None)
    hearing.started("id", "continuous", "n")
    hearing.progressed(progress_of("continuous", 0))
    hearing.terminated("continuous", None, None)
    assert others.method_calls == []


def test_without_monitor_the_runs_of_other_queries_are_not_reported(own: Mock) -> None:
    hearing = SessionListener()
    hearing.is_registered = True
    hearing.claim("own", own)
    hearing.started("id", "stranger", "n")
    hearing.progressed(progress_of("stranger", 0))
    hearing.progressed(progress_of("own", 0))
    hearing.terminated("stranger", None, None)
    assert heard(own) == [("progressed", "own")]


def test_an_error_is_reported_with_its_condition(hearing: SessionListener, own: Mock) -> None:
    hearing.claim("own", own)
    hearing.terminated(
        "own", "org.apache.spark.SomeException: no way\n\tat org.apache.Thing.run(T.scala)", "NO_WAY"
    )
    _, error = own.end.call_args.args
    assert (error.condition, error.message) == ("NO_WAY", "org.apache.spark.SomeException: no way")


def test_the_end_of_a_run_is_waited_for(hearing: SessionListener, own: Mock) -> None:
    hearing.claim("own", own)
    assert not hearing.await_end("own", 0.01)
    threading.Timer(0.05, hearing.terminated, ["own", None, None]).start()
    assert hearing.await_end("own", 20)
    assert heard(own) == [("end", "own")]
