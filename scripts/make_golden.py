"""Create the golden stores and checkpoints of this version in ``tests/golden/VERSION``.

Run ``python scripts/make_golden.py`` once for each release. Tests open the golden set of a release with every
later version, which must read it and continue its queries. So never recreate the set of a release. That of an
unreleased version may be deleted and recreated. It takes one or two minutes, and has the tests' requirements.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import penstock  # noqa: E402 - the line above makes `tests` importable
from penstock.store.database import Transaction  # noqa: E402
from penstock.testing.stores import with_schema  # noqa: E402
from tests.continuous.test_kills import Application, Copy  # noqa: E402
from tests.golden.contents import (  # noqa: E402
    DIALECTS,
    FOLDER,
    LIMIT,
    PASSED,
    SCHEMA,
    cases,
    copy_name,
    describe,
    fill,
)
from tests.support.crash.children import Children, Fault  # noqa: E402
from tests.support.limited_feeds import NOW, Feed  # noqa: E402
from tests.support.pgtools import program  # noqa: E402
from tests.support.postgres import start_postgres  # noqa: E402
from tests.support.processes import ChildProcess, run_child  # noqa: E402
from tests.support.sparks import make_spark  # noqa: E402

SESSION_LINES = re.compile(r"^(--|SET |SELECT pg_catalog\.set_config|\\|$)")


def main() -> None:
    target = FOLDER / penstock.__version__
    if target.exists():
        sys.exit(f"{target} exists: delete it first if {penstock.__version__} is not released yet")
    os.environ["TZ"] = "UTC"
    time.tzset()
    sources = Path(str(penstock.__file__)).parents[1]
    paths = [sources, ROOT, ROOT / "tests/support/startup"]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    server = start_postgres()
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-golden-") as folder:
            make(Path(folder), target, server.url)
    finally:
        server.stop()


def make(folder: Path, target: Path, pg_url: str) -> None:
    folders = {dialect: folder / dialect for dialect in DIALECTS}
    urls = {
        "sqlite": f"sqlite:///{folders['sqlite']}/store.db",
        "postgresql": with_schema(pg_url, SCHEMA),
    }
    for dialect in DIALECTS:
        folders[dialect].mkdir()
        with penstock.connect(urls[dialect]) as store:
            fill(store, urls[dialect])
    kill_micro_batches(urls, folders, folder)
    kill_continuous(urls, folders, folder)
    begin_limits(urls, folders, folder)
    for dialect in DIALECTS:
        save_golden(dialect, urls[dialect], folders[dialect], target / dialect)
    server_version = server_version_of(pg_url)
    made_with = {"penstock": penstock.__version__, "spark": spark_version(), "postgresql": server_version}
    (target / "made_with.json").write_text(json.dumps(made_with, indent=1) + "\n")


def kill_micro_batches(urls: dict[str, str], folders: dict[str, Path], folder: Path) -> None:
    """Let each query complete a chunk, and kill it in the next one.

    Then rows are staged, or they are in the sink and the micro-batch is not in Spark's log.
    """
    all_cases = [
        case for dialect in DIALECTS for case in cases(dialect, urls[dialect], str(folders[dialect]))
    ]
    for case in all_cases:
        case.create()
        case.append(0)
    children = Children(folder, children_in(folder))
    children.run(all_cases)
    for case in all_cases:
        case.append(1)
    faults = {
        case.name: Fault("COMMITTED", 3) if case.query.stateful else Fault("STAGED", 1) for case in all_cases
    }
    children.kill_at(all_cases, faults, master="local[4]")


def kill_continuous(urls: dict[str, str], folders: dict[str, Path], folder: Path) -> None:
    """Stop each query once, and then kill it after the commit of an epoch, before the epoch is logged."""
    copies = [
        Copy(copy_name(dialect), urls[dialect], folders[dialect], "exactly_once") for dialect in DIALECTS
    ]
    application = Application(copies, folder / "continuous", children_in(folder))
    for copy in copies:
        copy.add()
    child = application.start()
    application.wait_until_complete(child)
    application.stop(child)
    for copy in copies:
        copy.add()
    child = application.start("COMMITTED")
    application.wait_until_stopped(child)
    child.kill_tree()
    for copy in copies:
        copy.store.close()
        shutil.move(folder / "continuous" / copy.name, copy.folder / "checkpoints" / copy.name)


def begin_limits(urls: dict[str, str], folders: dict[str, Path], folder: Path) -> None:
    """Let each query process some of the rows of its limit."""
    spark = make_spark(folder / "spark")
    for dialect in DIALECTS:
        feed = Feed(spark, urls[dialect], folders[dialect])
        feed.add(PASSED // 2, PASSED - PASSED // 2)
        query = feed.start(LIMIT, trigger=NOW, checkpoint=f"checkpoints/limited_{dialect}")
        assert query.awaitTermination(60)
        feed.store.close()
    spark.stop()


def children_in(folder: Path) -> Callable[..., ChildProcess]:
    count = iter(range(1000))

    def run(module: str, *arguments: Any, **options: Any) -> ChildProcess:
        return run_child(module, *arguments, log=folder / f"child-{next(count)}.log", **options)

    return run


def save_golden(dialect: str, url: str, folder: Path, target: Path) -> None:
    with penstock.connect(url) as store:
        contents = describe(store)
        store.database.run(lambda tx: move_checkpoints(tx, folder.parent))
    target.mkdir(parents=True)
    lines = [json.dumps(contents[part], ensure_ascii=False, sort_keys=True) for part in contents]
    text = ",\n".join(f"{json.dumps(part)}: {line}" for part, line in zip(contents, lines, strict=True))
    (target / "expected.json").write_text(f"{{{text}}}\n")
    shutil.copytree(folder / "checkpoints", target / "checkpoints")
    if dialect == "sqlite":
        file = folder / "store.db"
        connection = sqlite3.connect(file)
        connection.execute("pragma wal_checkpoint(truncate)")
        connection.close()
        (target / "store.db.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    else:
        (target / "store.sql").write_text(dump_schema(url))


def move_checkpoints(tx: Transaction, folder: Path) -> None:
    """Replace the temporary folder in the paths of checkpoints."""
    table = "penstock_query" if tx.dialect == "sqlite" else f"{tx.schema}.query"
    tx.change(f"update {table} set checkpoint = replace(checkpoint, '{folder}', '/data')")


def dump_schema(url: str) -> str:
    """Dump the schema as SQL that any driver can run, without commands for psql and the session."""
    parts = urlsplit(url)
    command = [
        str(program("pg_dump")), f"--host={parts.hostname}", f"--port={parts.port}",
        f"--username={parts.username}", f"--dbname={parts.path[1:]}", f"--schema={SCHEMA}",
        "--inserts", "--no-owner", "--no-privileges",
    ]  # fmt: skip
    environment = {**os.environ, "PGPASSWORD": str(parts.password)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines: Sequence[str] = result.stdout.splitlines()
    return "\n".join(line for line in lines if not SESSION_LINES.match(line)) + "\n"


def server_version_of(url: str) -> str:
    import psycopg

    with psycopg.connect(url) as connection:
        return str(connection.info.server_version // 10000)


def spark_version() -> str:
    import pyspark

    return str(pyspark.__version__)


if __name__ == "__main__":
    main()
