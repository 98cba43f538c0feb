"""Proxy that delays what a client sends, like a network: ``python -m bench.delay HOST PORT SECONDS``.

It runs in a separate process, prints its port, and exits when its standard input is closed. A long message is
delayed once, not for each of its packets.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_CHUNK = 1 << 16


@contextmanager
def delayed(url: str, seconds: float) -> Iterator[str]:
    """Yield the URL of a PostgreSQL server whose round trips take longer by some seconds."""
    parts = urlsplit(url)
    command = [
        sys.executable,
        "-m",
        "bench.delay",
        str(parts.hostname),
        str(parts.port or 5432),
        str(seconds),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            login = parts.netloc.rpartition("@")[0]
            yield parts._replace(netloc=f"{login}@127.0.0.1:{port}").geturl()
        finally:
            process.stdin.close()


async def _serve(host: str, port: int, seconds: float) -> None:
    async def forward_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(_forward(reader, server_writer, seconds), _forward(server_reader, writer, 0.0))

    server = await asyncio.start_server(forward_connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    # Exiting closes the connections.
    os._exit(0)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    clock = asyncio.get_running_loop().time
    pending: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def send() -> None:
        while True:
            due, data = await pending.get()
            if not data:
                break
            await asyncio.sleep(max(due - clock(), 0.0))
            writer.write(data)
            await writer.drain()
        writer.close()

    sender = asyncio.create_task(send())
    while True:
        data = await reader.read(_CHUNK)
        pending.put_nowait((clock() + seconds, data))
        if not data:
            break
    await sender


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
