"""PostgreSQL server that a test upgrades to a later major version with pg_upgrade, behind one URL."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support import pgtools, postgres
from tests.support.postgres import PostgresServer, answers, free_port, start_postgres
from tests.support.postgres_guard import server_identity
from tests.support.postgres_proxy import Proxy, proxied
from tests.support.waiting import wait_until


class UpgradedServer:
    """Server of an earlier version that can be upgraded."""

    def __init__(self, old: PostgresServer, proxy: Proxy, new_home: Path) -> None:
        self._old, self._proxy, self._new_home = old, proxy, new_home
        self.url = proxy.url
        self._new: subprocess.Popen[bytes] | None = None

    def upgrade(self) -> None:
        """Stop the server, upgrade its data, and start the new version in its place."""
        folder, parts = self._old.directory, urlsplit(self._old.url)
        pid = int((folder / "data/postmaster.pid").read_text().split()[0])
        server = psutil.Process(pid)
        old_programs = Path(server.exe()).parent
        server.send_signal(2)  # SIGINT: PostgreSQL's fast shutdown
        wait_until(lambda: not (folder / "data/postmaster.pid").exists(), 60, "the shutdown")
        with _home(self._new_home):
            programs = postgres._binaries(folder)
        data, port = folder / "upgraded", str(free_port())
        self._run(
            programs / "initdb", f"--pgdata={data}", "--username=penstock", "--auth=trust", "--encoding=UTF8",
            "--locale=C", "--no-sync", "--no-data-checksums",
        )  # fmt: skip
        (folder / "data/pg_hba.conf").write_text("local all all trust\nhost all all all trust\n")
        self._run(
            programs / "pg_upgrade", f"--old-bindir={old_programs}", f"--new-bindir={programs}",
            f"--old-datadir={folder / 'data'}", f"--new-datadir={data}", "--username=penstock",
            f"--socketdir={folder}", f"--old-port={port}", f"--new-port={port}", "--no-sync",
            # The old server has a logical slot, so it does not start with a lower level.
            "--old-options=-c wal_level=logical",
        )  # fmt: skip
        options = [f"{name}={value}" for name, value in postgres.SETTINGS.items()]
        arguments = [argument for option in [*options, "fsync=off"] for argument in ("-c", option)]
        with (folder / "log").open("ab") as log:
            self._new = subprocess.Popen(
                [str(programs / "postgres"), "-D", str(data), "-p", port, *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, **server_identity(),
            )  # fmt: skip
        url = parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{port}").geturl()
        wait_until(lambda: answers(url), 60, "the upgraded server accepts connections")
        self._proxy.lead_to(url)

    def _run(self, *arguments: str | Path) -> None:
        postgres._run([str(argument) for argument in arguments], self._old.directory)

    def stop(self) -> None:
        if self._new is not None:
            self._new.send_signal(3)
            self._new.wait(30)


@contextmanager
def upgradable_server() -> Iterator[UpgradedServer]:
    """Run a server of the oldest version in the package, which can be upgraded to the newest one."""
    homes = sorted(pgtools._package_home().parent.glob("pginstall*"))
    if len(homes) < 2:
        pytest.skip("the package has one version of PostgreSQL")
    with _home(homes[0]):
        old = start_postgres()
    try:
        with proxied(old.url) as proxy:
            server = UpgradedServer(old, proxy, homes[-1])
            try:
                yield server
            finally:
                server.stop()
    finally:
        old.stop()


@contextmanager
def _home(home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(os.environ, "PENSTOCK_TEST_PG_HOME", str(home))
        yield
