"""Locations of tables: local paths and object store URLs."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from penstock.arguments import path_text

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(path: str) -> bool:
    """Whether a location is a URL rather than a local path."""
    return _URL.match(path) is not None


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a location that is the same in every process: executors have other working directories."""
    location = path_text("path", path)
    return location if is_url(location) else os.path.abspath(os.path.expanduser(location))


def shown_path(path: str) -> str:
    """Return a location for messages, without a password or a signature."""
    if "://" not in path:
        return path
    parts = urlsplit(path)
    user, at, host = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{user.partition(':')[0]}{at}{host}{parts.path}"
