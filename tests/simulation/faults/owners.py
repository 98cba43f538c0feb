"""Faults in the ownership of consumers, and in the plan of the micro-batch in flight."""

from __future__ import annotations

from tests.simulation.faults.fault import NO_COMPARE_AND_SET, NO_ROW_TIME_CHECK, Fault

OWNERS = [
    Fault(
        "an epoch is committed by a driver that does not own the consumer",
        "commit/owner.py",
        "    require_owner(registration, end.epoch, end.owner, end.generation)\n",
        "",
        baseline=NO_COMPARE_AND_SET,
    ),
    Fault(
        "an epoch is committed although the queue's rows were replaced",
        "commit/owner.py",
        "    require_owner(registration, end.epoch, end.owner, end.generation)\n    _require_source_rows(tx, registration, end)\n",
        "    require_owner(registration, end.epoch, end.owner, end.generation)\n",
        baseline=NO_COMPARE_AND_SET,
    ),
    Fault(
        "a previous owner is not fenced",
        "commit/owner.py",
        "if (registration.epoch, registration.owner) != (epoch, identity):",
        "if registration.epoch < epoch:",
    ),
    Fault(
        "a program can seek a consumer that a query owns",
        "queue/consumer.py",
        '                self.refuse_when_owned(tx, registration, "seek")\n',
        "",
    ),
    Fault(
        "the safe offset never follows the checkpoint",
        "commit/owner.py",
        "elif any(stored < end for stored, end in zip(safe_offsets, logged.end, strict=False)):",
        "elif False:",
    ),
    Fault(
        "a micro-batch is planned even if it does not start at the consumer's offset",
        "commit/owner.py",
        "if not _follows(tx, registration, end):",
        "if False:",
        baseline=NO_ROW_TIME_CHECK,
    ),
    Fault(
        "a consumer that lags behind the checkpoint is moved although the sink may have lost commits",
        "commit/owner.py",
        "    return expects_move or registration.plan != plan_text(logged)\n",
        "    return False\n",
    ),
    Fault(
        "a consumer is moved past an epoch of the sink from any offset",
        "commit/owner.py",
        "        if is_same_registration and offsets == start and _planned_from(registration, start):\n",
        "        if is_same_registration:\n",
    ),
    Fault(
        "a consumer is moved past an epoch of the sink that its owner has not planned",
        "commit/owner.py",
        "        if is_same_registration and offsets == start and _planned_from(registration, start):\n",
        "        if is_same_registration and offsets == start:\n",
    ),
    Fault(
        "a query that stops drains a consumer that another query owns",
        "commit/owner.py",
        "        if (planned.epoch, planned.owner) == (registration.epoch, registration.owner):\n",
        "        if planned.epoch <= registration.epoch:\n",
    ),
    Fault(
        "an owner does not take the owner lock",
        "commit/owner.py",
        "            return self._lock.acquire()\n",
        "            return True\n",
    ),
    Fault(
        "a new owner keeps the epoch of the previous one",
        "store/sql/common.sql",
        "set epoch = epoch + 1, owner = :owner, plan_epoch = null, draining = 0\n",
        "set owner = coalesce(owner, :owner), plan_epoch = null, draining = 0\n",
    ),
    Fault(
        "a new owner does not clear the draining state",
        "store/sql/common.sql",
        "set epoch = epoch + 1, owner = :owner, plan_epoch = null, draining = 0\n",
        "set epoch = epoch + 1, owner = :owner, plan_epoch = null\n",
    ),
    Fault(
        "a commit moves a consumer without compare-and-set",
        NO_COMPARE_AND_SET.file,
        NO_COMPARE_AND_SET.text,
        NO_COMPARE_AND_SET.replacement,
    ),
    Fault(
        "a consumer's offset does not follow its safe offset",
        "store/sql/common.sql",
        "set safe_index = :safe_index,\n    next_index = case when next_index < :safe_index then :safe_index else next_index end\n",
        "set safe_index = :safe_index\n",
    ),
    Fault(
        "a seek does not invalidate older checkpoints",
        "store/records/consumers.py",
        '    tx.run("set_generation", generation=generation, **registration.keys)\n',
        "    pass\n",
    ),
    Fault(
        "a consumer's registration is read without a lock",
        "store/records/consumers.py",
        '"lock_registration" if lock and tx.write else "find_registration", consumer=consumer, queue=queue',
        '"find_registration", consumer=consumer, queue=queue',
    ),
    Fault(
        "a query that has ended moves its consumer past an uncommitted micro-batch",
        "pipeline/micro_batches.py",
        "checkpoint.ranges(checkpoint.last_commit())\n",
        "checkpoint.ranges(checkpoint.last_planned())\n",
    ),
    Fault(
        "a query that stops drains the last owner in its checkpoint, which may be another run",
        "pipeline/micro_batches.py",
        "            if expected.get((offset.queue, str(offset.consumer))) == offset.epoch\n",
        "            if (offset.queue, str(offset.consumer)) in expected\n",
    ),
    Fault(
        "an epoch that another owner has committed with the same rows counts as the driver's own",
        "commit/protocol.py",
        "        if source.unplanned:\n            require_owner(",
        "        if False:\n            require_owner(",
    ),
]
