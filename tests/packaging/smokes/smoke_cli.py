"""The command line."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime

import pyarrow as pa
from asking import THERE, command, command_needs

import penstock

os.environ["PENSTOCK_URL"] = "sqlite:///cli.db"
assert command("--version").split() == ["penstock", penstock.__version__]
assert "Commands" in command("--help")
command("store", "init")
command("queue", "create", "orders", "--schema", "id bigint not null, amount decimal(10,2)")
command("queue", "put", "orders", "-", given='{"id": 1, "amount": 2.5}\n')
assert json.loads(command("queue", "tail", "orders", "-n", "1", "--json"))["id"] == 1
command("consumer", "create", "billing")
command("consumer", "register", "billing", "orders")
assert "1" in command("consumer", "lag", "billing")
command("consumer", "seek", "billing", "orders", "--to", "latest")
command_needs("postgres", "queue", "list", "--url", "postgresql://nobody@127.0.0.1:1/none")
contract = penstock.ChangeContract("id")
penstock.QueueFeed.create(
    "feed", pa.schema([("id", pa.int64())]), contract, store="sqlite:///cli.db"
).append_commit(1, datetime.now(UTC), [{"id": 1, "_change_type": "insert"}])
command_needs("spark", "changes", "show", "queue:feed")
command_needs("delta", "changes", "show", "delta:/nowhere?row_id=id")
command_needs("iceberg", "changes", "show", "iceberg:a.b")
with open("job.py", "w") as job:
    job.write("def job(df):\n    return df\n")
command_needs("spark", "modes", "check", "job:job", "--schema", "id bigint")
if "spark" in THERE:
    assert "append" in command("modes", "check", "job:job", "--schema", "id bigint")
    assert '"insert"' in command("changes", "show", "queue:feed", "--json")
