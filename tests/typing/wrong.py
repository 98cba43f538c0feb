"""What a type checker must find wrong: each line that is says how at its end."""

from pyspark.sql import DataFrame, SparkSession

import penstock

penstock.conect  # E: attr-defined
penstock.connect(5)  # E: arg-type
penstock.connect()  # E: call-arg
penstock.Retention(rows="many")  # E: arg-type
penstock.Retention(lines=5)  # E: call-arg


def queues(store: penstock.Store) -> None:
    store.create_queue("orders")  # E: call-arg
    store.create_queue("orders", None, partitions="4")  # E: arg-type
    store.queue("orders").read("0", 0)  # E: arg-type
    store.queue("orders").read(0, 0, None, 10)  # E: call-arg
    store.consumer("billing").advance("orders", 0, 5, 6)  # E: call-arg
    store.consumer("billing").seek("orders")  # E: call-arg
    store.consumer("billing").seek("orders", to=5)  # E: arg-type
    store.producer("orders")  # E: call-arg
    rows: str = store.consumer("billing").lag("orders").rows  # E: assignment


def pipelines(spark: SparkSession, query: penstock.Query) -> None:
    penstock.stream("orders", spark)  # E: arg-type
    stream = penstock.stream(spark, penstock.QueueSource("orders"))
    stream.transform("amount > 10")  # E: arg-type
    stream.transform(lambda df: 5)  # E: arg-type, return-value
    stream.write("big")  # E: arg-type
    stream.write(penstock.QueueSink("big")).start(trigger="10 seconds")  # E: arg-type
    penstock.QueueSink(5)  # E: arg-type
    penstock.TableSink("totals", ["id"], None, "app")  # E: call-arg
    query.awaitEpoch(5)  # E: attr-defined
    query.id = "other"  # E: misc


def looks(spark: SparkSession, df: DataFrame) -> None:
    penstock.take(df)  # E: call-arg
    penstock.take(df, "10")  # E: arg-type
    penstock.modes.check(df)[0]  # E: index
    penstock.changes.read(spark, 5)  # E: arg-type
    penstock.changes.read("flights", spark)  # E: arg-type
    penstock.ChangeContract()  # E: call-arg
    penstock.log_progress()  # E: call-arg
