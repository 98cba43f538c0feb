"""Server for Iceberg's REST catalog protocol over a SQLite catalog, with faults on demand.

It issues tokens for a client's credentials, and storage credentials with each table.
"""

from __future__ import annotations

import json
import threading
import uuid
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, Table
from typing_extensions import override

CLIENT_ID, CLIENT_SECRET = "clientofours", "hiddenclientsecret"
SESSION = "hiddensessiontoken"
"""A part of the storage credentials of all tables."""
_ERRORS = {
    CommitFailedException: 409,
    NamespaceAlreadyExistsError: 409,
    TableAlreadyExistsError: 409,
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
}
_PREFIX = "of%20ours"


@dataclass(frozen=True)
class Reply:
    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def error(cls, status: int, kind: str, message: str, **headers: str) -> Reply:
        body = {"error": {"message": message, "type": kind, "code": status}}
        return cls(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


Fault = Callable[[Callable[[], Reply]], Reply | None]
"""Handles a request. Calling the function executes it, and returning None closes the connection."""


def refused(status: int, **headers: str) -> Fault:
    """Answer with an error without executing the request."""
    return lambda work: Reply.error(status, "Refused", f"status {status}", **headers)


def lost_reply(status: int) -> Fault:
    """Execute the request, and answer with an error."""

    def fault(work: Callable[[], Reply]) -> Reply:
        work()
        return Reply.error(status, "Lost", f"status {status}")

    return fault


def no_reply(work: Callable[[], Reply]) -> None:
    """Execute the request, and close the connection."""
    work()


def hung_up(work: Callable[[], Reply]) -> None:
    """Close the connection without executing the request."""


def login_page(work: Callable[[], Reply]) -> Reply:
    """Answer like a proxy that asks for a login."""
    return Reply(200, "<html>Log in</html>")


class RestCatalogServer:
    """Running server."""

    def __init__(self, folder: Path, warehouse: str, config: Mapping[str, str]) -> None:
        folder.mkdir(exist_ok=True)
        database = f"sqlite:///{folder}/rest.db"
        self.catalog = SqlCatalog("served", uri=database, warehouse=warehouse, **config)
        self.uri = ""
        self.config = {"s3.session-token": SESSION, **config}
        """The storage properties that clients get with each table."""
        self.requests: list[str] = []
        """The operations of all requests."""
        self.tokens: list[str] = []
        """All tokens that were issued."""
        self._valid: set[str] = set()
        self.faults: list[tuple[str, Fault]] = []
        self.fault_at_random: Callable[[], Fault | None] = lambda: None
        """Selects a fault or None for each request without a fault from :meth:`fail`."""
        self._lock, self._work_lock = threading.Lock(), threading.Lock()

    @property
    def properties(self) -> dict[str, str]:
        """The properties of the catalog for clients."""
        return {
            "type": "rest",
            "uri": self.uri,
            "credential": f"{CLIENT_ID}:{CLIENT_SECRET}",
            "oauth2-server-uri": f"{self.uri}/v1/oauth/tokens",
        }

    def fail(self, operation: str, *faults: Fault) -> None:
        """Answer the next requests for an operation, such as ``commit``, with faults, in order."""
        with self._lock:
            self.faults += [(operation, fault) for fault in faults]

    @property
    def pending(self) -> int:
        """The number of faults that have not been used."""
        return len(self.faults)

    def expire_tokens(self) -> None:
        """Invalidate all tokens that were issued before."""
        self._valid.clear()

    def handle(self, request: Request) -> Reply | None:
        operation = request.operation
        with self._lock:
            self.requests.append(operation)
            index = next((i for i, (name, _) in enumerate(self.faults) if name == operation), None)
            fault = self.fault_at_random() if index is None else self.faults.pop(index)[1]
        return self._execute(request) if fault is None else fault(lambda: self._execute(request))

    def _execute(self, request: Request) -> Reply:
        if request.operation == "token":
            return self._token(request)
        if request.token not in self._valid:
            message = f"token {request.token} has expired"
            return Reply.error(401, "NotAuthorizedException", message)
        try:
            with self._work_lock:
                reply: Reply = getattr(self, f"_{request.operation}")(request)
                return reply
        except tuple(_ERRORS) as error:
            return Reply.error(_ERRORS[type(error)], type(error).__name__, str(error))

    def _token(self, request: Request) -> Reply:
        if request.client != f"{CLIENT_ID}:{CLIENT_SECRET}":
            return Reply(401, {"error": "invalid_client", "error_description": f"wrong: {request.client}"})
        token = f"opaque{uuid.uuid4().hex}"
        self.tokens.append(token)
        self._valid.add(token)
        return Reply(200, {"access_token": token, "token_type": "bearer", "expires_in": 3600})

    def _config(self, request: Request) -> Reply:
        return Reply(200, {"defaults": {}, "overrides": {"prefix": _PREFIX}})

    def _create_namespace(self, request: Request) -> Reply:
        body = json.loads(request.body)
        self.catalog.create_namespace(tuple(body["namespace"]))
        return Reply(200, {"namespace": body["namespace"], "properties": {}})

    def _create(self, request: Request) -> Reply:
        body = json.loads(request.body)
        table = self.catalog.create_table(
            (*request.namespace, body["name"]),
            Schema.model_validate(body["schema"]),
            properties=body["properties"],
        )
        return self._describe_table(table, request)

    def _load(self, request: Request) -> Reply:
        return self._describe_table(self.catalog.load_table(request.table), request)

    def _drop(self, request: Request) -> Reply:
        self.catalog.drop_table(request.table)
        return Reply(204)

    def _commit(self, request: Request) -> Reply:
        commit = CommitTableRequest.model_validate_json(request.body)
        table = self.catalog.load_table(request.table)
        self.catalog.commit_table(table, commit.requirements, commit.updates)
        return self._describe_table(self.catalog.load_table(request.table), request)

    def _describe_table(self, table: Table, request: Request) -> Reply:
        metadata = json.loads(table.metadata.model_dump_json())
        if request.query.get("snapshots") == ["refs"]:
            kept = {ref["snapshot-id"] for ref in metadata["refs"].values()}
            metadata["snapshots"] = [
                snapshot for snapshot in metadata["snapshots"] if snapshot["snapshot-id"] in kept
            ]
        body = {"metadata-location": table.metadata_location, "metadata": metadata, "config": self.config}
        return Reply(200, body)


class Request:
    """Request to a catalog."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self.body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        headers = handler.headers
        # Clients that sign their requests as AWS does send the original header under the other name.
        self._authorization = headers.get("Original-Authorization") or headers.get("Authorization") or ""
        parts = urlsplit(handler.path)
        self.query = parse_qs(parts.query)
        self._method = handler.command
        self._path = parts.path.removeprefix("/v1/").removeprefix(f"{_PREFIX}/").split("/")

    @property
    def operation(self) -> str:
        if self._path == ["oauth", "tokens"]:
            return "token"
        parts = len(self._path)
        operations = {
            ("GET", 1): "config",
            ("POST", 1): "create_namespace",
            ("POST", 3): "create",
            ("GET", 4): "load",
            ("POST", 4): "commit",
            ("DELETE", 4): "drop",
        }
        return operations[self._method, parts]

    @property
    def client(self) -> str:
        """The credentials of a client that requests a token, in either form of OAuth."""
        if self._authorization.startswith("Basic "):
            return b64decode(self._authorization.removeprefix("Basic ")).decode()
        form = parse_qs(self.body.decode())
        return f"{form['client_id'][0]}:{form['client_secret'][0]}"

    @property
    def token(self) -> str:
        return self._authorization.removeprefix("Bearer ")

    @property
    def namespace(self) -> Sequence[str]:
        return unquote(self._path[1]).split("\x1f")

    @property
    def table(self) -> tuple[str, ...]:
        return (*self.namespace, unquote(self._path[3]))


@contextmanager
def rest_catalog(
    folder: Path, warehouse: str | None = None, config: Mapping[str, str] | None = None
) -> Iterator[RestCatalogServer]:
    """Run a catalog whose tables are in a folder, or in a warehouse that clients open with `config`."""
    catalog = RestCatalogServer(folder, warehouse or f"file://{folder}/warehouse", config or {})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            reply = catalog.handle(Request(self))
            if reply is None:
                self.close_connection = True
                return
            body = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
            data = b"" if reply.body is None else body.encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _handle  # noqa: N815 - the names of http.server

        @override
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        catalog.uri = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield catalog
        finally:
            server.shutdown()
            thread.join()
