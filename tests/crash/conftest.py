"""Fixtures of the crash tests: stores of both kinds, and children that start fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.testing import temporary_store_url
from tests.support.crash.cases import Case
from tests.support.crash.children import Children


@pytest.fixture
def urls(tmp_path: Path, pg_url: str) -> Iterator[Mapping[str, str]]:
    """A new store of each kind."""
    with temporary_store_url(pg_url) as postgres:
        yield {"sqlite": f"sqlite:///{tmp_path}/store.db", "postgresql": postgres}


@pytest.fixture
def make_case(tmp_path: Path, urls: Mapping[str, str]) -> Callable[..., Case]:
    """`make_case(store, kind, guarantee, chunks=1)`: a case whose queues are there."""

    def make(store: str, kind: str, guarantee: str, *, chunks: int = 1, **more: object) -> Case:
        case = Case(f"{kind} {guarantee} {store}", urls[store], kind, guarantee, str(tmp_path), **more)
        case.create()
        for number in range(chunks):
            case.append(number)
        return case

    return make


@pytest.fixture
def children(tmp_path: Path, run_child: Callable[..., Any]) -> Children:
    return Children(tmp_path, run_child)
