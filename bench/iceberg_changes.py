"""Changes of random keys in Iceberg tables of two sizes: position deletes, compared with copy-on-write."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pyiceberg.catalog.sql import SqlCatalog

import penstock
from bench.applied_changes import CHANGES, FEW, MANY, ROUNDS, AppliedChanges, growth_result
from bench.harness import Result, bounded, pairs, scratch


def growth(rounds: int = ROUNDS) -> list[Result]:
    """Measure changes in tables of one million and ten million keys."""
    results, seconds = [], []
    for keys in (FEW, MANY):
        with scratch() as folder:
            bench = _Bench(folder, keys)
            ours, peer = pairs(
                partial(bench.by_mode, "merge-on-read"), partial(bench.by_mode, "copy-on-write"), rounds
            )
            seconds.append(ours)
            name = f"{CHANGES:,} changes into Iceberg, {keys:,} keys / copies of files"
            results.append(bounded(name, ours, None, "s", peer=peer))
    return [*results, growth_result(seconds)]


class _Bench(AppliedChanges):
    """Table with a number of keys, which the query has written."""

    def __init__(self, folder: Path, keys: int) -> None:
        self.properties = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
        }
        properties = "&".join(f"property.{name}={value}" for name, value in self.properties.items())
        super().__init__(
            folder,
            keys,
            penstock.TableSink("shop.t", ["id"], f"iceberg:lake?{properties}", apply_changes=True),
        )
        self.apply(*self.id_chunks())

    def by_mode(self, mode: str) -> float:
        table = SqlCatalog("lake", **self.properties).load_table(("shop", "t"))
        table.transaction().set_properties({"write.merge.mode": mode}).commit_transaction()
        return self.apply()
