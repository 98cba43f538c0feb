"""A proxy that delays what a client sends, as a network does: ``python -m bench.delay HOST PORT SECONDS``.

It is a process of its own, prints its port, and ends when its standard input does. A long message is delayed
once, and not for each of its packets.
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
    """The URL of a PostgreSQL server whose round trips take so much longer."""
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
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(_forward(reader, server_writer, seconds), _forward(server_reader, writer, 0.0))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    # Its connections end with it.
    os._exit(0)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    clock = asyncio.get_running_loop().time
    coming: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def send() -> None:
        while True:
            due, data = await coming.get()
            if not data:
                break
            await asyncio.sleep(max(due - clock(), 0.0))
            writer.write(data)
            await writer.drain()
        writer.close()

    sending = asyncio.create_task(send())
    while True:
        data = await reader.read(_CHUNK)
        coming.put_nowait((clock() + seconds, data))
        if not data:
            break
    await sending


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
