"""The monitor page."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request

from asking import THERE, command, command_needs

command("--url", "sqlite:///ui.db", "store", "init")
command("--url", "sqlite:///ui.db", "queue", "create", "orders", "--schema", "id bigint")
command_needs("ui", "--url", "sqlite:///ui.db", "ui", "--port", "0")
if "ui" in THERE:
    words = ["penstock", "--url", "sqlite:///ui.db", "ui", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+/", server.stdout.readline())
            assert found is not None
            with urllib.request.urlopen(f"{found[0]}api/snapshot", timeout=30) as answer:
                snapshot = json.load(answer)
            assert [queue["name"] for queue in snapshot["queues"]] == ["orders"]
            with urllib.request.urlopen(found[0], timeout=30) as answer:
                assert b"<script" in answer.read()
        finally:
            server.terminate()
    # Once it has ended what was open, uvicorn hands the signal on.
    assert server.returncode == -signal.SIGTERM, server.returncode
