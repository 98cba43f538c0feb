"""Program: a service whose pipelines run until it is asked to stop. Arguments: those of
tests.support.crash.child.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import penstock
from tests.support.crash.cases import Case
from tests.support.sparks import make_spark


def start(spark: SparkSession, case: Case) -> Any:
    (queue,) = case.sources
    source = penstock.QueueSource(queue, consumer=case.name, url=case.url)
    stream = penstock.stream(spark, source).transform(lambda frame: case.query.transform([frame]))
    sink = penstock.QueueSink(case.name, url=case.target)
    return stream.write(sink, guarantee=case.guarantee).start(checkpoint=case.checkpoint, name=case.name)


def main(folder: str, master: str, *texts: str) -> None:
    spark = make_spark(Path(folder), master)
    cases = [Case.from_json(text) for text in texts]
    queries = [start(spark, case) for case in cases]
    for case, query in zip(cases, queries, strict=True):
        query.awaitTermination()
        print(f"ENDED {case.name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
