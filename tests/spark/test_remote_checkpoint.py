"""A checkpoint that is not on the local disk: on an FTP server, which Spark and Python both reach by URL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock import Store
from penstock.spark.checkpoint import Checkpoint
from tests.spark.support import fill, forget_commit, ids_in, make_queue, refusal, run, start, stream

PASSWORD = "f7p-s3cret"


@dataclass(frozen=True)
class Remote:
    """A folder of this machine, and the URL under which it is served."""

    folder: Path
    url: str


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import FTPHandler
    from pyftpdlib.servers import FTPServer

    folder = tmp_path_factory.mktemp("ftp")
    authorizer = DummyAuthorizer()
    authorizer.add_user("spark", PASSWORD, str(folder), perm="elradfmwMT")
    handler = type("Handler", (FTPHandler,), {"authorizer": authorizer})
    server = FTPServer(("127.0.0.1", 0), handler)
    port = server.socket.getsockname()[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"timeout": 0.05}, daemon=True)
    thread.start()
    yield Remote(folder, f"ftp://spark:{PASSWORD}@127.0.0.1:{port}")
    server.close_all()


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
            forget_commit(remote.folder / name)
    assert ids_in(out) == [0, 1]
    assert consumer.offsets("orders") == {0: 2}


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
            forget_commit(remote.folder / name)
    assert sorted(ids_in(out)) == [1, 2, 3]
    assert "CONSUMER_BOUND" in refusal(
        lambda: [fill(queue, [4]), run(frame, store_url, "out", f"{remote.url}/other-{store.uuid}")]
    )


def test_the_password_is_not_shown(spark: SparkSession, store: Store, store_url: str, remote: Remote) -> None:
    fill(make_queue(store), [1])
    make_queue(store, "out")
    location = f"{remote.url}/hidden-{store.uuid}"
    run(stream(spark, store_url), store_url, "out", location)
    (remote.folder / f"hidden-{store.uuid}" / "offsets" / "0").unlink()
    with pytest.raises(Exception, match="offsets/0 cannot be read") as caught:
        Checkpoint(location).offsets(0)
    assert PASSWORD not in str(caught.value)
    assert "spark:***@" in str(caught.value)
    query = start(
        stream(spark, store_url), store_url, "out", location, trigger={"processingTime": "0 seconds"}
    )
    query.stop()
    assert PASSWORD not in repr(Checkpoint(location))


def test_a_wrong_password(remote: Remote) -> None:
    with pytest.raises(Exception, match="cannot be read from Python") as caught:
        Checkpoint(remote.url.replace(PASSWORD, "wr0ng") + "/ck")
    assert "wr0ng" not in str(caught.value)
