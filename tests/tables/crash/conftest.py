"""New stores, and cases in them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.stores import drop_schema, with_schema
from tests.support.crash.children import Children
from tests.tables.crash.cases import TableCase


@pytest.fixture
def make_case(tmp_path: Path, pg_url: str) -> Iterator[Callable[..., TableCase]]:
    """`make_case(store, kind, chunks=1)`: a case whose queue and consumer are there."""
    schema = f"t_{uuid.uuid4().hex}"
    postgres = with_schema(pg_url, schema)
    urls = {"sqlite": f"sqlite:///{tmp_path}/store.db", "postgresql": postgres}

    def make(store: str, kind: str, *, chunks: int = 1, **more: Any) -> TableCase:
        table_url = f"{postgres}&options=-csearch_path%3D{schema}" if store == "postgresql" else None
        name = f"{kind} {store}{more.pop('suffix', '')}"
        case = TableCase(name, urls[store], kind, "exactly_once", str(tmp_path), table_url, **more)
        case.create()
        for number in range(chunks):
            case.append(number)
        return case

    yield make
    drop_schema(pg_url, schema)


@pytest.fixture
def children(tmp_path: Path, run_child: Callable[..., Any]) -> Children:
    return Children(tmp_path, run_child)
