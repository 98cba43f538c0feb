"""Folders of tables: local paths, and URLs of object stores."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from penstock.arguments import path_text

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def absolute(path: str | os.PathLike[str]) -> str:
    """The same place for every process: executors have working directories of their own."""
    given = path_text("path", path)
    return given if is_url(given) else os.path.abspath(os.path.expanduser(given))


def shown_path(path: str) -> str:
    """A path or URL without a password or a signature in it."""
    if "://" not in path:
        return path
    parts = urlsplit(path)
    user, at, host = parts.netloc.rpartition("@")
    named = f"{user.partition(':')[0]}{at}{host}"
    return f"{parts.scheme}://{named}{parts.path}"
