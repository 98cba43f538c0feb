"""What all tests of PostgreSQL feeds need."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _decoding_server(decoding_server: None) -> None:
    """Also for tests that start servers of their own."""
