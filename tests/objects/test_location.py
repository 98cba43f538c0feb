"""Where payloads can be kept, and how it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import InvalidInputError, InvalidUrlError
from penstock.objects.location import is_local, local_folder, parse_location


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("s3://rows", "s3://rows"),
        ("s3://rows/", "s3://rows"),
        ("s3a://rows/a/b/", "s3://rows/a/b"),
        ("S3://rows/a", "s3://rows/a"),
        ("gs://rows/a", "gs://rows/a"),
        ("az://rows/a", "az://rows/a"),
        ("abfss://rows@account.dfs.core.windows.net/a", "abfss://rows@account.dfs.core.windows.net/a"),
        ("file:///rows/a", "file:///rows/a"),
        ("file://localhost/rows", "file:///rows"),
        ("/rows/a", "file:///rows/a"),
        ("/rows with/100%", "file:///rows%20with/100%25"),
    ],
)
def test_one_location_has_one_url(written: str, url: str) -> None:
    assert parse_location(written) == url
    assert parse_location(url) == url


def test_a_relative_path_is_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = parse_location("rows")
    assert is_local(url)
    assert local_folder(url) == os.path.join(tmp_path, "rows")


@pytest.mark.parametrize(
    "written",
    [
        "s3://user:hidden-password@rows/a",
        "s3://rows:9000/a",
        "s3:/rows/a",
        "s3:/key:hidden-password@rows/a",
        "s3://rows/a?versionId=hidden-password",
        "s3://rows/a#b",
        "s3://rows/a/../b",
        "s3:///a",
        "ftp://rows/a",
        "https://rows/a",
        "file://host/rows",
        "s3://rows/a\nb",
        "s3://AKIA%3Ahidden-password@rows/a",
        "s3://key@rows/a",
        "s3://rows%2f/a",
        "s3://-rows/a",
        "abfss://rows/a",
        "abfss://a@b@account.dfs.core.windows.net/a",
        "file:///rows/%2e%2e/root",
        "file:///rows/a%2f..%2fb",
        "s3://rows/a\x9bb",
        "s3://rows/%E2%80%AE",
        "s3://rows/%0a",
        "s3://[rows/a",
        "s3://rows/" + "a" * 2000,
    ],
)
def test_other_locations_are_refused_without_showing_a_password(written: str) -> None:
    with pytest.raises(InvalidUrlError) as refused:
        parse_location(written)
    assert refused.value.condition == "INVALID_URL.PAYLOADS"
    assert "hidden-password" not in str(refused.value)


@pytest.mark.parametrize("written", ["", "  ", 3, None])
def test_what_is_no_path_is_refused(written: object) -> None:
    with pytest.raises(InvalidInputError):
        parse_location(written)  # type: ignore[arg-type]
