"""Server for the protocols of S3 and Glue, in a separate process.

It cannot be a thread, because libraries hold Python's global interpreter lock while they wait for a reply.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.request import Request, urlopen

_PROGRAM = """
import sys
from moto.glue import exceptions, responses
from moto.server import ThreadedMotoServer
from threading import Lock

update, lock = responses.GlueResponse.update_table, Lock()

class ConcurrentModification(exceptions.GlueClientError):
    def __init__(self):
        super().__init__("ConcurrentModificationException", "Update table failed")

def update_version(self):
    # moto updates any version of a table, and Glue only the one that the client has seen.
    with lock:
        name = self.parameters["DatabaseName"], self.parameters["TableInput"]["Name"]
        version = self.glue_backend.get_table(*name).as_dict()["VersionId"]
        if self.parameters.get("VersionId", version) != version:
            raise ConcurrentModification
        return update(self)

responses.GlueResponse.update_table = update_version
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%s" % server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""
KEY, SECRET = "AKIAHIDDENHIDDEN", "hiddenhiddenhiddenhidden"


def storage_properties(endpoint: str) -> dict[str, str]:
    """Return the properties of an Iceberg catalog whose tables are on the server."""
    return {
        "s3.endpoint": endpoint,
        "s3.access-key-id": KEY,
        "s3.secret-access-key": SECRET,
        "s3.region": "us-east-1",
    }


def glue_properties(endpoint: str, storage: str) -> dict[str, str]:
    """Return the properties of the Glue catalog on the server, with its tables in the bucket ``lake``."""
    return {
        "type": "glue",
        "glue.endpoint": endpoint,
        "glue.region": "us-east-1",
        "glue.access-key-id": KEY,
        "glue.secret-access-key": SECRET,
        "warehouse": "s3://lake/warehouse",
        **storage_properties(storage),
    }


def settings(endpoint: str) -> dict[str, str]:
    """Return the environment variables for a process that uses the server or a proxy in front of it."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


@dataclass(frozen=True)
class ObjectStore:
    """Running server. :meth:`bucket` creates its buckets."""

    endpoint: str

    def bucket(self, name: str) -> None:
        """Create an empty bucket."""
        self._request(f"/{name}", "PUT")

    def refuse_everybody(self) -> None:
        """Reject all credentials from now on."""
        self._request("/moto-api/reset-auth", "POST", b"0")

    def admit_everybody(self) -> None:
        """Accept all credentials from now on, as at the start."""
        self._request("/moto-api/reset-auth", "POST", b"inf")

    def _request(self, path: str, method: str, data: bytes | None = None) -> None:
        request = Request(self.endpoint + path, data, {"Content-Type": "text/plain"}, method=method)
        with urlopen(request, timeout=30):
            pass


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a server."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield ObjectStore(server.stdout.readline().strip())
        finally:
            server.stdin.close()
