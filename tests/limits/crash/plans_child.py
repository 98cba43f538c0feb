"""Runs queries with a limit until they end or it is killed. Arguments: a folder, and each plan as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import penstock
from tests.limits.crash.plans import CONTINUOUS, Plan
from tests.support.sparks import make_spark
from tests.support.warm import warm_workers


def main(folder: str, *texts: str) -> None:
    # A continuous query has a slot for each of two tasks, and leaves one.
    with warm_workers():
        spark = make_spark(Path(folder), f"local[{2 * len(texts) + 1}]")
    queries = []
    for text in texts:
        plan = Plan(**json.loads(text))
        options = {} if plan.trigger == CONTINUOUS else {"maxRowsPerTrigger": plan.size}
        source = penstock.QueueSource(f"{plan.name} in", consumer=plan.name, url=plan.url, options=options)
        stream = penstock.stream(spark, source)
        if plan.filtered:
            stream = stream.transform(lambda df: df.where("id % 3 != 0"))
        trigger = (
            penstock.Trigger.continuous("20 ms")
            if plan.trigger == CONTINUOUS
            else penstock.Trigger.processing_time()
        )
        pipeline = stream.limit(plan.limit).write(penstock.QueueSink(plan.name, url=plan.url))
        queries.append(pipeline.start(name=plan.name, checkpoint=plan.checkpoint, trigger=trigger))
        print(f"STARTED {plan.name}", flush=True)
    print("ALL STARTED", flush=True)
    for query in queries:
        query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
