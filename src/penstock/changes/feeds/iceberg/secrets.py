"""What libraries say, without what they should not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.redaction import redact

_CHARACTERS = 500
_SHORTEST_SECRET = 4


def without_secrets(error: Any, properties: Mapping[str, Any]) -> str:
    """The first line of a library's error, without the values of a catalog's properties."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    for name, value in properties.items():
        if len(str(value)) >= _SHORTEST_SECRET and name not in ("type", "warehouse"):
            text = text.replace(str(value), "…")
    # Cut last: half of a secret would not be recognised.
    return redact(text)[:_CHARACTERS]
