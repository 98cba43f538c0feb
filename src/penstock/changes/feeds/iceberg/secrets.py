"""What libraries say, without what they should not say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PASSWORD = re.compile(r"(://[^:/@\s]*):[^@\s]*@")
_SHORTEST_SECRET = 4


def without_secrets(error: Any, properties: Mapping[str, Any]) -> str:
    """The first line of a library's error, without the values of a catalog's properties."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"[:500]
    for name, value in properties.items():
        if len(str(value)) >= _SHORTEST_SECRET and name not in ("type", "warehouse"):
            text = text.replace(str(value), "…")
    return _PASSWORD.sub(r"\1:…@", text)
