"""Locations of payloads outside the database: a folder, or a prefix in a bucket."""

from __future__ import annotations

import os
import re
from urllib.parse import quote, unquote, urlsplit

from penstock.arguments import in_quotes, path_text
from penstock.errors import InvalidUrlError

LOCAL = "file"
_CLOUD_SCHEMES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "abfss",
    "abfss": "abfss",
}
_MAX_CHARACTERS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ONE_SLASH_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/(?!/)")


def parse_location(value: str | os.PathLike[str]) -> str:
    """Return the URL of a location in canonical form.

    Parameters
    ----------
    value
        ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``,
        ``abfss://container@account.dfs.core.windows.net/prefix``, ``file:///folder``, or a local path.

    Raises
    ------
    InvalidUrlError
        When it is none of these, or has a password or a query. Credentials come from the environment.
    """
    text = path_text("payloads", value)
    if _ONE_SLASH_URL.match(text):
        raise _invalid_location("it has one slash after the scheme, and would be a folder of that name")
    if not _URL.match(text):
        # Make it absolute, because other processes have other working directories.
        text = "file://" + quote(os.path.abspath(os.path.expanduser(text)))
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise _invalid_location("it is not a URL") from error
    scheme = parts.scheme.lower()
    if parts.query or parts.fragment or ":" in parts.netloc:
        raise _invalid_location(
            "it has a password, a port or a query: credentials and endpoints come from the environment, "
            "such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL"
        )
    if len(text) > _MAX_CHARACTERS or not unquote(text).isprintable():
        raise _invalid_location(
            f"it has more than {_MAX_CHARACTERS} characters, or some that cannot be printed"
        )
    path = parts.path.strip("/")
    if path and any(step in ("", ".", "..") for step in unquote(path).split("/")):
        raise _invalid_location("its path has empty steps, '.' or '..'")
    if scheme == LOCAL:
        if parts.netloc not in ("", "localhost"):
            raise _invalid_location(f"file:// has no host, as in file:///{parts.netloc}{parts.path}")
        return f"{LOCAL}:///{path}"
    if scheme not in _CLOUD_SCHEMES:
        raise _invalid_location(f"{in_quotes(scheme)} is not a kind of object storage that Penstock supports")
    if not parts.netloc:
        raise _invalid_location("it names no bucket")
    bucket, separator, account = parts.netloc.partition("@")
    if bool(separator) != (_CLOUD_SCHEMES[scheme] == "abfss") or not all(
        map(_NAME.fullmatch, [bucket, account or bucket])
    ):
        raise _invalid_location(
            "its bucket has a user, or other characters than letters, digits, '.', '-' and '_': credentials "
            "come from the environment"
        )
    return f"{_CLOUD_SCHEMES[scheme]}://{parts.netloc}/{path}".rstrip("/")


def stored_location(value: object) -> str:
    """Check a location from a database, which must have the form that :func:`parse_location` returns.

    Raises
    ------
    InvalidUrlError
        When it does not have this form, so another program wrote it.
    """
    if not isinstance(value, str) or not value.strip() or parse_location(value) != value:
        raise _invalid_location("it does not have the form in which Penstock stores locations")
    return value


def local_folder(url: str) -> str:
    """Return the local folder of a location."""
    return unquote(urlsplit(url).path)


def is_local(url: str) -> bool:
    """Return whether a location is a folder on this machine, possibly mounted."""
    return url.startswith(f"{LOCAL}://")


def _invalid_location(reason: str) -> InvalidUrlError:
    # The location is not shown: it may have a password.
    return InvalidUrlError(
        f"payloads cannot be kept at this location: {reason}. Use a URL such as s3://bucket/prefix, "
        "or a folder",
        condition="INVALID_URL.PAYLOADS",
    )
