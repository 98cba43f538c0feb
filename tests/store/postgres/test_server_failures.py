"""Classification of a PostgreSQL server's errors, which the store and change feeds share."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors

from penstock.store.postgres.connection import Failure, failure_of


@pytest.mark.parametrize(
    ("state", "failure"),
    [
        ("28P01", Failure.LOGIN),
        ("3D000", Failure.NO_DATABASE),
        ("57P04", Failure.NO_DATABASE),
        ("55P03", Failure.LOCKED),
        ("08006", Failure.UNAVAILABLE),
        ("25P03", Failure.UNAVAILABLE),
        ("25P04", Failure.UNAVAILABLE),
        ("40001", Failure.UNAVAILABLE),
        ("40P01", Failure.UNAVAILABLE),
        ("53300", Failure.UNAVAILABLE),
        ("57P01", Failure.UNAVAILABLE),
        ("57P05", Failure.UNAVAILABLE),
        ("53100", Failure.OTHER),
        ("57014", Failure.OTHER),
        ("42P01", Failure.OTHER),
    ],
)
def test_an_sqlstate_is_classified_as_a_kind_of_failure(state: str, failure: Failure) -> None:
    assert failure_of(errors.lookup(state)("whatever it says")) is failure


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ('FATAL:  password authentication failed for user "ann"', Failure.LOGIN),
        ("fe_sendauth: no password supplied", Failure.LOGIN),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1"', Failure.LOGIN),
        ('FATAL:  role "ann" is not permitted to log in', Failure.LOGIN),
        ('FATAL:  role "ann" does not exist', Failure.LOGIN),
        ('FATAL:  database "shop" does not exist', Failure.NO_DATABASE),
        ("connection refused: is the server running on that host?", Failure.UNAVAILABLE),
        ("server closed the connection unexpectedly", Failure.UNAVAILABLE),
    ],
)
def test_a_refused_connection_is_classified_by_its_message(text: str, failure: Failure) -> None:
    assert failure_of(psycopg.OperationalError(text)) is failure


def test_a_programming_error_is_not_retried() -> None:
    assert failure_of(psycopg.ProgrammingError("the query has 1 placeholder")) is Failure.OTHER
