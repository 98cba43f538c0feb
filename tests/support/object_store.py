"""A server with S3's own protocol, in a process of its own.

Libraries wait for it while they hold Python's lock.
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
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%s" % server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""
KEY, SECRET = "AKIAHIDDENHIDDEN", "hiddenhiddenhiddenhidden"


def settings(endpoint: str) -> dict[str, str]:
    """The environment of a process that uses the server, or a proxy in front of it."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


@dataclass(frozen=True)
class ObjectStore:
    """Where the server is; its buckets are made by :meth:`bucket`."""

    endpoint: str

    def bucket(self, name: str) -> None:
        """Make an empty bucket."""
        self._ask(f"/{name}", "PUT")

    def refuse_everybody(self) -> None:
        """From now on nobody has the credentials for anything."""
        self._ask("/moto-api/reset-auth", "POST", b"0")

    def _ask(self, path: str, method: str, data: bytes | None = None) -> None:
        request = Request(self.endpoint + path, data, {"Content-Type": "text/plain"}, method=method)
        with urlopen(request, timeout=30):
            pass


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A running server."""
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
