"""Store URLs: how they are parsed, which are refused, and that no message shows a password."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from penstock.errors import InvalidUrlError
from penstock.store.url import parse_url, seconds

SECRET = "s3cr3t"


def test_a_sqlite_path_is_absolute_or_relative_to_the_working_directory(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_url("sqlite:///a/b.db").target == f"{tmp_path}/a/b.db"
    assert parse_url("sqlite:////a/b.db").target == "/a/b.db"


@pytest.mark.parametrize("name", ["a b", "50%", "what?", "ü", "x#y", "a;b"])
def test_a_displayed_sqlite_url_opens_the_same_file(name: str) -> None:
    from urllib.parse import quote

    url = parse_url(f"sqlite:////tmp/{quote(name)}")
    assert url.target == f"/tmp/{name}"
    assert parse_url(str(url)).target == url.target


@pytest.mark.parametrize(
    ("url", "word", "problem"),
    [
        ("sqlite://x.db", "sqlite:///relative.db", ".MISSING_PART"),
        ("sqlite:///", "has no file name", ".MISSING_PART"),
        ("sqlite:///:memory:", "in memory", ".MISSING_PART"),
        ("sqlite:///x.db?sinchronous=full", "'synchronous'", ".UNKNOWN_PARAMETER"),
        ("sqlite:///x.db?synchronous=off", "full or normal", ".VALUE"),
        ("sqlite:///x.db?busy_timeout=-1", "milliseconds", ".VALUE"),
        ("sqlite:///x.db?lock_wait=5s", "busy_timeout", ".UNKNOWN_PARAMETER"),
        ("postgresql://host/db?lock_wait=5", "30s, 500ms or 2min", ".VALUE"),
        ("postgresql://host/db?lock_wait=0s", "30s, 500ms or 2min", ".VALUE"),
        ("postgresql://host/db?lock_wait=", "30s, 500ms or 2min", ".VALUE"),
        ("sqlite:///x\0.db", "NUL", ""),
        ("mysql://host/x", "sqlite or postgresql", ".UNKNOWN_KIND"),
        ("x.db", "sqlite:///relative.db", ""),
        ("", "sqlite:///relative.db", ""),
        (None, "sqlite:///relative.db", ""),
        ("postgresql://host:port/db", "port number", ""),
        ("postgresql://host:65536/db", "port number of at most 65535", ""),
        ("postgresql://host/db?schema=" + "x" * 64, "63 bytes", ".VALUE"),
    ],
)
def test_an_invalid_url_is_refused_with_an_example(url: str, word: str, problem: str) -> None:
    with pytest.raises(InvalidUrlError) as caught:
        parse_url(url)
    assert word in str(caught.value)
    assert caught.value.condition == f"INVALID_URL{problem}"


def test_a_postgresql_url_passes_every_option_except_the_schema_to_libpq() -> None:
    url = parse_url("postgres://me:pw@h1:1,[::1]:2/db?schema=a%20b&sslmode=require&options=-c%20x%3Dy")
    assert url.target == "postgresql://me:pw@h1:1,[::1]:2/db?sslmode=require&options=-c%20x%3Dy"
    assert (url.schema, url.options) == ('"a b"', {"schema": "a b"})


@pytest.mark.parametrize(("text", "expected"), [("500ms", 0.5), ("30s", 30), ("2min", 120)])
def test_lock_wait_is_not_passed_to_libpq(text: str, expected: float) -> None:
    url = parse_url(f"postgresql://host/db?lock_wait={text}&sslmode=require")
    assert url.target == "postgresql://host/db?sslmode=require"
    assert seconds(url.options["lock_wait"]) == expected


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}@host/db",
        f"postgresql://me:{SECRET}@x@host/db",
        f"postgresql://me@host/db?password={SECRET}&sslpassword={SECRET}2",
        f"postgresql:///db?user=me&password={SECRET}",
        f"postgresql://me:%20{SECRET}@host/db",
    ],
)
def test_no_text_form_of_a_url_contains_the_password(url: str) -> None:
    parsed = parse_url(url)
    for text in (str(parsed), repr(parsed), parsed.redacted, f"{parsed}"):
        assert SECRET not in text
    assert SECRET not in parsed.without_secrets(f"failed\n  in {parsed.target}")


@pytest.mark.parametrize("blanks", ["\t", "  ", "\n"])
def test_a_password_with_blanks_is_hidden_in_a_message_of_several_lines(blanks: str) -> None:
    password = f"one{blanks}two"
    parsed = parse_url(f"postgresql://me:{quote(password)}@host/db")
    assert parsed.without_secrets(f"cannot log in\n with {password}.") == "cannot log in. with ***."


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}/x@host/db",
        f"postgresql://me:{SECRET}?x@host/db",
        f"postgresql://me:{SECRET}#x@host/db",
        f"postgresql://me:1?{SECRET}@host/db",
        f"postgresql://me:{SECRET}",
        f"mysql://me:{SECRET}@host/db",
        f"sqlite://me:{SECRET}@host/db",
        f"me:{SECRET}@host",
        f"x://host/db?password={SECRET}",
        f"//me:{SECRET}@x@y/z",
        f"host=db user=app password='my {SECRET}' dbname=x",
        f"host=db password = {SECRET}",
        f"host=db PassWord={SECRET}",
        f"password={SECRET} sslrootcert=file://x",
        f"sqlite://host=db password='my {SECRET}'",
        f"postgresql://host=db password='my {SECRET}'",
        f"postgresql://user=app password={SECRET}@db/x",
        f"postgresql://db/x password={SECRET}",
        f"postgresql://me@{SECRET}@host/db",
        f"postgresql://me@{SECRET}:5432@host/db",
        f"postgresql://me@x@{SECRET}@host/db",
        f"postgresql://@{SECRET}@host/db",
        f"postgresql:///x?host=db password='my {SECRET}'",
        f"app {SECRET}",
    ],
)
def test_no_error_about_a_url_contains_the_password(url: str) -> None:
    with pytest.raises(InvalidUrlError) as caught:
        parse_url(url)
    assert SECRET not in f"{caught.value} {caught.value!r} {caught.value.parameters}"
