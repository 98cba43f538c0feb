/** Snapshots for tests. */
import type { Consumer, Query, Queue, Snapshot } from "./snapshot";

export function snapshot(parts: Partial<Snapshot> = {}): Snapshot {
  return {
    version: "0.1.0",
    taken_at: "2026-11-23T06:40:00.000Z",
    every_seconds: 1,
    store: { url: "sqlite:///shop.db", kind: "sqlite", error: null },
    queues: [],
    consumers: [],
    queries: [],
    ledger: [],
    dead_letters: [],
    notes: [],
    ...parts,
  };
}

export function queue(parts: Partial<Queue> = {}): Queue {
  return {
    name: "orders",
    rows: 1,
    bytes: 1,
    rows_per_second: 0,
    bytes_per_second: 0,
    oldest_at: null,
    oldest_seconds: null,
    last_append_at: null,
    key: [],
    keeps: { rows: null, age_seconds: null, bytes: null },
    partitions: [],
    history: [],
    ...parts,
  };
}

export function consumer(parts: Partial<Consumer> = {}): Consumer {
  return {
    consumer: "billing",
    queue: "orders",
    vital: false,
    lag_rows: 0,
    lag_bytes: 0,
    lag_seconds: 0,
    owner: null,
    stuck: false,
    stuck_seconds: null,
    partitions: [],
    history: [],
    ...parts,
  };
}

export function query(parts: Partial<Query> = {}): Query {
  return {
    id: "q",
    run_id: "r",
    name: "large",
    engine: "micro-batch",
    state: "running",
    batch: 412,
    unit: "batch",
    rows_in: null,
    rows_out: null,
    rows_in_per_second: null,
    latency_ms: null,
    batch_duration_ms: null,
    duration_ms: null,
    watermark: null,
    finalized_until: null,
    state_rows: null,
    state_bytes: null,
    last_error: null,
    spark_ui: null,
    checkpoint: null,
    source: null,
    sink: null,
    started_at: null,
    updated_at: "2026-11-23T06:39:00.000Z",
    history: [],
    ...parts,
  };
}
