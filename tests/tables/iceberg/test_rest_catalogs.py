"""Iceberg tables in a REST catalog that is busy, loses replies, lets tokens expire, or refuses access."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyiceberg.catalog
import pytest
from pyiceberg.utils.config import Config

from penstock.errors import PenstockError, StoreUnavailableError, TableRefusedError
from penstock.feeds.iceberg import IcebergFeed
from penstock.lake.catalogs import task_io
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.location import IcebergLocation
from penstock.tables.iceberg.schema import rows_layout, table_schema
from tests.support.feed_reading import changes
from tests.support.object_store import KEY, SECRET, object_store, storage_properties
from tests.support.rest_catalog import (
    CLIENT_ID,
    CLIENT_SECRET,
    SESSION,
    Fault,
    Reply,
    RestCatalogServer,
    hung_up,
    login_page,
    lost_reply,
    no_reply,
    refused,
    rest_catalog,
)
from tests.tables.delta.driver import FIRST, FOLDS, SECOND
from tests.tables.iceberg.changes_driver import ChangesDriver
from tests.tables.iceberg.driver import ROWS, Driver


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestCatalogServer]:
    with rest_catalog(tmp_path / "served") as served:
        yield served


def writing(server: RestCatalogServer, tmp_path: Path, **options: str) -> Driver:
    return Driver(tmp_path, catalog={**server.properties, **options})


BUSY = [refused(503, Retry_After="0"), refused(429, Retry_After="0"), refused(503), hung_up, refused(500)]
LOST = [lost_reply(500), lost_reply(502), lost_reply(503), lost_reply(504), no_reply]

SIGNING = {
    "rest.sigv4-enabled": "true",
    "rest.signing-region": "us-east-1",
    "rest.signing-name": "glue",
    "client.access-key-id": KEY,
    "client.secret-access-key": SECRET,
}


@pytest.mark.few(8)
@pytest.mark.parametrize("fault", [*BUSY, *LOST])
@pytest.mark.parametrize("operation", ["create_namespace", "create", "load", "commit"])
def test_a_request_that_fails_is_repeated(
    server: RestCatalogServer, tmp_path: Path, operation: str, fault: Fault
) -> None:
    assert IcebergLocation("lake", ("other", "t"), server.properties).find() is None
    server.fail(operation, fault)
    driver = writing(server, tmp_path)
    driver.write(0, [(1, "a")])
    assert server.pending == 0
    assert driver.rows() == [(1, "a")]
    assert driver.orphans == []


@pytest.mark.few(8)
@pytest.mark.parametrize("fault", [refused(503, Retry_After="0"), refused(429), hung_up, no_reply])
@pytest.mark.parametrize("operation", ["token", "config"])
@pytest.mark.parametrize("client", ["credential", "oauth2", "signed"])
def test_a_request_that_opens_the_catalog_is_repeated(
    server: RestCatalogServer, client: str, operation: str, fault: Fault
) -> None:
    properties: dict[str, Any] = dict(server.properties)
    if client == "oauth2":
        login = {"client_id": CLIENT_ID, "client_secret": CLIENT_SECRET}
        auth = {"type": "oauth2", "oauth2": {**login, "token_url": f"{server.uri}/v1/oauth/tokens"}}
        properties = {"uri": server.uri, "auth": auth}
    if client == "signed":
        properties |= SIGNING
    server.fail(operation, fault, fault)
    assert IcebergLocation("lake", ("other", "t"), properties).find() is None
    assert server.pending == 0


def test_a_token_that_is_fetched_later_is_repeated_too(server: RestCatalogServer) -> None:
    login = {"client_id": CLIENT_ID, "client_secret": CLIENT_SECRET, "refresh_margin": 3600}
    auth = {"type": "oauth2", "oauth2": {**login, "token_url": f"{server.uri}/v1/oauth/tokens"}}
    location = IcebergLocation("lake", ("other", "t"), {"uri": server.uri, "auth": auth})  # type: ignore[dict-item]
    assert location.find() is None
    server.fail("token", refused(503), hung_up)
    assert location.find() is None
    assert server.pending == 0


@pytest.mark.parametrize("operation", ["token", "config"])
def test_a_refused_login_is_reported_at_once(server: RestCatalogServer, operation: str) -> None:
    server.fail(operation, *[refused(401)] * 20)
    with pytest.raises(StoreUnavailableError) as caught:
        IcebergLocation("lake", ("other", "t"), server.properties).find()
    assert caught.value.condition == "STORE_UNAVAILABLE.ACCESS_DENIED"
    assert server.requests.count(operation) == 1


def test_a_catalog_that_does_not_answer_at_first_is_asked_again(
    server: RestCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.lake.catalogs.REPLY_TIMEOUT_SECONDS", 0.2)
    server.fail("token", lambda _: time.sleep(1))
    server.fail("config", lambda _: time.sleep(1))
    assert IcebergLocation("lake", ("other", "t"), server.properties).find() is None


@pytest.mark.parametrize("scd_type", [1, 2])
def test_every_other_reply_is_lost(server: RestCatalogServer, tmp_path: Path, scd_type: int) -> None:
    done = lambda work: work()  # noqa: E731
    for operation in ("create", "load", "commit"):
        server.fail(operation, *[lost_reply(502), done, no_reply, done] * 3)
    driver = ChangesDriver(tmp_path, scd_type, catalog=server.properties)
    driver.apply(0, FIRST)
    driver.apply(1, SECOND)
    assert driver.rows() == FOLDS[scd_type]([*FIRST, *SECOND])
    assert driver.orphans == []


def test_a_signed_request_that_fails_is_repeated(server: RestCatalogServer, tmp_path: Path) -> None:
    driver = writing(server, tmp_path, **SIGNING)
    server.fail("load", refused(503), hung_up)
    server.fail("commit", refused(503), no_reply)
    driver.write(0, [(1, "a")])
    assert server.pending == 0
    assert driver.rows() == [(1, "a")]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
def test_a_catalog_that_fails_at_random_loses_and_repeats_nothing(
    server: RestCatalogServer, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.lake.catalogs._MIN_BACKOFF", 0.01)
    monkeypatch.setattr("penstock.lake.catalogs._MAX_RETRIES", 1)
    chance = random.Random(seed)
    faults = [refused(503), refused(409), hung_up, lost_reply(500), lost_reply(503), no_reply, refused(419)]
    server.fault_at_random = lambda: chance.choice(faults) if chance.random() < 0.3 else None
    scd_type = chance.choice([1, 2])
    events = [*FIRST, *SECOND]
    for batch_id, event in enumerate(events):
        for _ in range(50):
            with suppress(PenstockError):
                driver = ChangesDriver(tmp_path, scd_type, catalog=server.properties)
                driver.apply(batch_id, [event])
                break
        else:
            pytest.fail("it never succeeds")
    server.fault_at_random = lambda: None
    driver = ChangesDriver(tmp_path, scd_type, catalog=server.properties)
    assert driver.rows() == FOLDS[scd_type](events)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 90_000)
    ChangesDriver(tmp_path, scd_type, app_id="other", catalog=server.properties)
    assert driver.orphans == []


def test_a_catalog_that_names_a_time_is_not_asked_before(server: RestCatalogServer, tmp_path: Path) -> None:
    driver = writing(server, tmp_path)
    server.fail("commit", refused(503, Retry_After="1"))
    begun = time.monotonic()
    driver.write(0, [(1, "a")])
    assert time.monotonic() - begun >= 1


@pytest.mark.parametrize("fault", [refused(503, Retry_After="0"), refused(500), hung_up])
def test_a_catalog_that_stays_away_fails_the_micro_batch_and_the_next_run_writes_it(
    server: RestCatalogServer, tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    driver = writing(server, tmp_path)
    server.fail("commit", *[fault] * 100)
    with pytest.raises(StoreUnavailableError) as caught:
        driver.write(0, [(1, "a")])
    assert caught.value.condition == "STORE_UNAVAILABLE.ICEBERG"
    server.faults.clear()
    writing(server, tmp_path).write(0, [(1, "a")])
    assert driver.rows() == [(1, "a")]


def test_a_catalog_that_does_not_answer_is_left_in_time(
    server: RestCatalogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.lake.catalogs.REPLY_TIMEOUT_SECONDS", 0.2)
    driver = writing(server, tmp_path)

    def slow(work: object) -> None:
        time.sleep(1)

    server.fail("commit", slow)
    begun = time.monotonic()
    driver.write(0, [(1, "a")])
    assert driver.rows() == [(1, "a")]
    assert time.monotonic() - begun < 1


def test_an_expired_token_is_fetched_anew(server: RestCatalogServer, tmp_path: Path) -> None:
    driver = writing(server, tmp_path)
    server.expire_tokens()
    driver.write(0, [(1, "a")])
    server.fail("commit", lambda work: (server.expire_tokens(), work())[1])
    driver.write(1, [(2, "b")])
    server.fail("load", refused(419))
    driver.write(2, [(3, "c")])
    assert driver.rows() == [(1, "a"), (2, "b"), (3, "c")]


def test_a_token_that_cannot_be_fetched_anew_is_reported(server: RestCatalogServer, tmp_path: Path) -> None:
    writing(server, tmp_path)
    given = {"type": "rest", "uri": server.uri, "token": server.tokens[-1]}
    driver = Driver(tmp_path, catalog=given)
    server.expire_tokens()
    with pytest.raises(StoreUnavailableError, match="refuses access") as caught:
        driver.write(0, [(1, "a")])
    assert caught.value.condition == "STORE_UNAVAILABLE.ACCESS_DENIED"
    assert server.tokens[-1] not in str(caught.value)


def test_no_message_has_a_secret(
    server: RestCatalogServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    tokens = {}
    driver = writing(server, tmp_path)
    tokens["commit"] = server.tokens[-1]
    feed = IcebergFeed("shop.t", "lake", server.properties).open()
    assert feed.newest(0) == 0
    tokens["load"] = server.tokens[-1]
    wrong = {**server.properties, "credential": f"me:{CLIENT_SECRET}2"}

    def echo(operation: str, status: int) -> Fault:
        return lambda _: Reply.error(status, "Echo", f"{tokens[operation]} {CLIENT_SECRET} {SESSION}")

    cases: list[tuple[str, int, Callable[[], object]]] = [
        ("STORE_UNAVAILABLE.ACCESS_DENIED", 403, lambda: driver.write(0, [(1, "a")])),
        ("STORE_UNAVAILABLE.ICEBERG", 404, lambda: driver.write(0, [(1, "a")])),
        ("COMMIT_REFUSED.TABLE_CHANGED", 409, lambda: driver.write(0, [(1, "a")])),
        ("STORE_UNAVAILABLE.ACCESS_DENIED", 0, lambda: Driver(tmp_path, catalog=wrong)),
        ("FEED_UNAVAILABLE.ACCESS_DENIED", 403, lambda: feed.newest(0)),
        ("FEED_UNAVAILABLE.CATALOG", 500, lambda: feed.newest(0)),
    ]
    for condition, status, work in cases:
        operation = "load" if condition.startswith("FEED") else "commit"
        server.faults = [(operation, echo(operation, status))] * 20 if status else []
        with pytest.raises(PenstockError, match=r"…") as caught:
            work()
        error = caught.value
        assert error.condition == condition
        for secret in (*server.tokens, CLIENT_SECRET, SESSION):
            assert secret not in f"{error} {error!r} {vars(error)} {caplog.text}"


def test_tasks_get_the_credentials_of_the_storage_alone(server: RestCatalogServer, tmp_path: Path) -> None:
    driver = writing(server, tmp_path)
    driver.write(0, [(1, "a")])
    table = driver.table
    feed = IcebergFeed("shop.t", "lake", server.properties).open()
    target = FileTarget.of("t", table.io, table.metadata, "attempt")
    for sent in (pickle.dumps(target), pickle.dumps(feed.tasks(0, 1, 10))):
        assert SESSION.encode() in sent
        for secret in (CLIENT_SECRET, server.uri, *server.tokens):
            assert secret.encode() not in sent
        assert CLIENT_SECRET not in f"{target!r} {driver.location!r} {feed!r}"


@pytest.mark.parametrize("signing", [True, False])
def test_tasks_get_a_token_only_if_the_catalog_signs_requests_to_the_storage(
    server: RestCatalogServer, tmp_path: Path, signing: bool
) -> None:
    if signing:
        server.config["s3.signer"] = "S3V4RestSigner"
    table = writing(server, tmp_path).table
    sent = task_io(pickle.loads(pickle.dumps(table.io)))
    token = server.tokens[-1]
    assert (token.encode() in pickle.dumps(sent)) == signing
    assert CLIENT_SECRET.encode() not in pickle.dumps(sent)
    if signing:
        assert sent.properties["auth.manager"].auth_header() == f"Bearer {token}"


def test_a_page_in_place_of_a_reply_is_not_taken_for_a_refusal(
    server: RestCatalogServer, tmp_path: Path
) -> None:
    driver = writing(server, tmp_path)
    server.fail("load", login_page)
    with pytest.raises(StoreUnavailableError) as caught:
        driver.write(0, [(1, "a")])
    assert caught.value.condition == "STORE_UNAVAILABLE.ICEBERG"


def configured(monkeypatch: pytest.MonkeyPatch, name: str, properties: Mapping[str, object]) -> None:
    """Have a catalog in pyiceberg's configuration file."""
    config = Config()
    config.config = {"catalog": {name: dict(properties)}}
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", config)


def test_a_client_that_fetches_tokens_itself(
    server: RestCatalogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks get no credentials of the catalog, and pyiceberg's object that fetches tokens cannot be sent."""
    client = {"client_id": "clientofours", "client_secret": CLIENT_SECRET}
    auth = {"type": "oauth2", "oauth2": {**client, "token_url": f"{server.uri}/v1/oauth/tokens"}}
    configured(monkeypatch, "lake", {"type": "rest", "uri": server.uri, "auth": auth})
    driver = Driver(tmp_path, catalog={"type": "rest"})
    driver.write(0, [(1, "a")])
    feed = IcebergFeed("shop.t", "lake").open()
    assert changes(feed, 0, 1)["k"].to_pylist() == [1]


def test_storage_credentials_of_the_catalog_are_used(tmp_path: Path) -> None:
    with object_store() as s3:
        s3.bucket("lake")
        config = storage_properties(s3.endpoint)
        with rest_catalog(tmp_path / "served", "s3://lake/warehouse", config) as server:
            driver = writing(server, tmp_path)
            driver.write(0, [(1, "a")])
            assert driver.rows() == [(1, "a")]


def test_files_of_old_snapshots_stay_if_the_catalog_is_asked_for_the_newest_ones(
    server: RestCatalogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = {"snapshot-loading-mode": "refs"}
    driver = writing(server, tmp_path, **mode)
    monkeypatch.setattr("penstock.tables.iceberg.attempts.Attempt.delete_pending_file", lambda *_: None)
    driver.write(0, [(1, "a")])
    complete = Driver(tmp_path, "complete", app_id="other", catalog={**server.properties, **mode})
    complete.write(0, [(2, "b")])
    complete.write(1, [(3, "c")])
    monkeypatch.undo()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 90_000)
    writing(server, tmp_path, **mode)
    table = server.catalog.load_table(("shop", "t"))
    first = table.metadata.snapshots[0].snapshot_id
    assert table.scan(snapshot_id=first).to_arrow().to_pylist() == [{"k": 1, "v": "a"}]
    feed = IcebergFeed("shop.t", "lake", {**server.properties, **mode}).open()
    assert len(changes(feed, 0, 3)) == 5


def test_nested_namespaces_and_names_of_any_form(server: RestCatalogServer, tmp_path: Path) -> None:
    location = IcebergLocation("lake", ("a b", "ü/%", 'c."d'), server.properties)
    location.create(table_schema(rows_layout(ROWS, ())))
    assert location.find() is not None


def test_a_name_that_is_a_view_is_refused(server: RestCatalogServer, tmp_path: Path) -> None:
    server.fail("create", refused(409))
    with pytest.raises(TableRefusedError) as caught:
        writing(server, tmp_path)
    assert caught.value.condition == "TABLE_REFUSED.NOT_ICEBERG"
