"""What a type checker must find wrong: each line that is says how at its end."""

from pyspark.sql import DataFrame, SparkSession

import penstock as ps

ps.conect  # E: attr-defined
ps.connect(5)  # E: arg-type
ps.connect()  # E: call-arg
ps.Retention(rows="many")  # E: arg-type
ps.Retention(lines=5)  # E: call-arg


def queues(store: ps.Store) -> None:
    store.create_queue("orders")  # E: call-arg
    store.create_queue("orders", None, partitions="4")  # E: arg-type
    store.queue("orders").read("0", 0)  # E: arg-type
    store.queue("orders").read(0, 0, None, 10)  # E: call-arg
    store.consumer("billing").advance("orders", 0, 5, 6)  # E: call-arg
    store.consumer("billing").seek("orders")  # E: call-arg
    store.consumer("billing").seek("orders", to=5)  # E: arg-type
    store.producer("orders")  # E: call-arg
    rows: str = store.consumer("billing").lag("orders").rows  # E: assignment


def pipelines(spark: SparkSession, query: ps.Query) -> None:
    ps.stream("orders", spark)  # E: arg-type
    stream = ps.stream(spark, ps.QueueSource("orders"))
    stream.transform("amount > 10")  # E: arg-type
    stream.transform(lambda df: 5)  # E: arg-type, return-value
    stream.write("big")  # E: arg-type
    stream.write(ps.QueueSink("big")).start(trigger="10 seconds")  # E: arg-type
    ps.QueueSink(5)  # E: arg-type
    ps.TableSink("totals", ["id"], None, "app")  # E: call-arg
    query.awaitEpoch(5)  # E: attr-defined
    query.id = "other"  # E: misc


def looks(spark: SparkSession, df: DataFrame) -> None:
    ps.take(df)  # E: call-arg
    ps.take(df, "10")  # E: arg-type
    ps.modes.check(df)[0]  # E: index
    ps.changes.read(spark, 5)  # E: arg-type
    ps.changes.read("flights", spark)  # E: arg-type
    ps.ChangeContract()  # E: call-arg
    ps.log_progress()  # E: call-arg
