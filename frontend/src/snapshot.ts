/** What `penstock ui` says of a store at one moment. Times are ISO 8601 in UTC; `null` is not known. */
export interface Snapshot {
  version: string;
  taken_at: string;
  every_seconds: number;
  store: StoreState;
  queues: Queue[];
  consumers: Consumer[];
  queries: Query[];
  ledger: LedgerRow[];
  dead_letters: DeadLetters[];
  notes: string[];
}

export interface StoreState {
  url: string;
  kind: string;
  error: string | null;
}

export interface Queue {
  name: string;
  rows: number;
  bytes: number;
  rows_per_second: number | null;
  bytes_per_second: number | null;
  oldest_at: string | null;
  oldest_seconds: number | null;
  last_append_at: string | null;
  key: string[];
  keeps: { rows: number | null; age_seconds: number | null; bytes: number | null };
  partitions: QueuePartition[];
  history: { at: string; rows_per_second: number | null }[];
}

export interface QueuePartition {
  partition: number;
  first_index: number;
  next_index: number;
  rows: number;
  bytes: number;
  segments: number;
  oldest_at: string | null;
}

export interface Consumer {
  consumer: string;
  queue: string;
  vital: boolean;
  lag_rows: number | null;
  lag_bytes: number | null;
  lag_seconds: number | null;
  owner: { app_id: string | null; query: string | null; epoch: number; alive: boolean | null } | null;
  stuck: boolean;
  stuck_seconds: number | null;
  partitions: ConsumerPartition[];
  history: { at: string; lag_rows: number | null }[];
}

export interface ConsumerPartition {
  partition: number;
  offset: number;
  safe_offset: number | null;
  next_index: number;
  lag_rows: number;
}

/** `files only`: known by its checkpoint alone, so that nobody can tell whether it runs. */
export type QueryState = "running" | "stopped" | "failed" | "silent" | "files only";

export interface Percentiles {
  p50: number | null;
  p90: number | null;
  p99: number | null;
  max: number | null;
}

export interface Query {
  id: string;
  run_id: string | null;
  name: string | null;
  engine: string | null;
  state: QueryState;
  batch: number | null;
  unit: string;
  rows_in: number | null;
  rows_out: number | null;
  rows_in_per_second: number | null;
  /** Of the rows of a continuous query's last epoch. */
  latency_ms: Percentiles | null;
  /** Of a micro-batch query's newest micro-batches, however long their rows waited before. */
  batch_duration_ms: (Percentiles & { batches: number }) | null;
  duration_ms: Record<string, number> | null;
  watermark: string | null;
  /** The time before which it has all commits of its change feeds. */
  finalized_until: string | null;
  state_rows: number | null;
  state_bytes: number | null;
  last_error: { condition: string | null; message: string; at: string | null } | null;
  spark_ui: string | null;
  checkpoint: string | null;
  source: string | null;
  sink: string | null;
  started_at: string | null;
  updated_at: string | null;
  history: QueryPoint[];
}

export interface QueryPoint {
  at: string;
  rows_in: number | null;
  rows_out: number | null;
  p50: number | null;
  p99: number | null;
  batch_p50: number | null;
  batch_p99: number | null;
  duration_ms: number | null;
  state_rows: number | null;
}

export interface LedgerRow {
  sink: string;
  app_id: string;
  query: string | null;
  batch: number;
  rows: number | null;
  committed_at: string | null;
}

export interface DeadLetters {
  queue: string;
  rows: number;
  last_append_at: string | null;
  newest: { at: string | null; reason: string | null; value: string | null }[];
}
