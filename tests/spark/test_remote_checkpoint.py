"""A checkpoint that is not on the local disk: on an FTP server, which Spark and Python both reach by URL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock import Store
from penstock.errors import CommitRefusedError
from penstock.spark.checkpoint import Checkpoint
from penstock.testing import replay_last_batch
from tests.support.spark_queues import fill, ids_in, make_queue, one_store, refusal, run, stream

PASSWORD = "f7p-s3cret"


@dataclass(frozen=True)
class Remote:
    """A folder on this machine, and the URL at which it is served."""

    folder: Path
    url: str


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import FTPHandler
    from pyftpdlib.servers import ThreadedFTPServer

    folder = tmp_path_factory.mktemp("ftp")
    authorizer = DummyAuthorizer()
    authorizer.add_user("spark", PASSWORD, str(folder), perm="elradfmwMT")
    handler = type("Handler", (FTPHandler,), {"authorizer": authorizer})
    # A loop for each connection: the single one loses a connection whose file number another one just had.
    server = ThreadedFTPServer(("127.0.0.1", 0), handler)
    port = server.socket.getsockname()[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"timeout": 0.05}, daemon=True)
    thread.start()
    yield Remote(folder, f"ftp://spark:{PASSWORD}@127.0.0.1:{port}")
    server.close_all()


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_a_stateless_query_restarts_and_repeats(
    spark: SparkSession, store: Store, store_url: str, remote: Remote
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    consumer = queue.register(store.create_consumer("billing").name)
    name = f"stateless-{store.uuid}"
    for number in range(2):
        fill(queue, [number])
        for _ in range(2):
            run(stream(spark, store_url, consumer="billing"), store_url, "out", f"{remote.url}/{name}")
            replay_last_batch(remote.folder / name)
    assert ids_in(out) == [0, 1]
    assert consumer.offsets("orders") == {0: 2}


@one_store
def test_a_stateful_query_restarts_and_repeats(
    spark: SparkSession, store: Store, store_url: str, remote: Remote
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    queue.register(store.create_consumer("billing").name)
    frame = stream(spark, store_url, consumer="billing").dropDuplicates(["id"])
    name = f"stateful-{store.uuid}"
    for ids in ([1, 1, 2], [2, 3]):
        fill(queue, ids)
        for _ in range(2):
            run(frame, store_url, "out", f"{remote.url}/{name}")
            replay_last_batch(remote.folder / name)
    assert sorted(ids_in(out)) == [1, 2, 3]
    assert "CONSUMER_BOUND" in refusal(
        lambda: [fill(queue, [4]), run(frame, store_url, "out", f"{remote.url}/other-{store.uuid}")]
    )


def test_the_password_is_not_shown(remote: Remote) -> None:
    checkpoint = Checkpoint(f"{remote.url}/hidden")
    with pytest.raises(CommitRefusedError, match="offsets/0 cannot be read") as caught:
        checkpoint.offsets(0)
    assert PASSWORD not in f"{caught.value} {caught.value.parameters} {checkpoint!r}"
    assert "spark:***@" in str(caught.value)


def test_a_wrong_password_is_refused_and_not_shown(remote: Remote) -> None:
    with pytest.raises(CommitRefusedError, match="cannot be read from Python") as caught:
        Checkpoint(f"{remote.url.replace(PASSWORD, 'wr0ng')}/ck")
    assert "wr0ng" not in str(caught.value)
