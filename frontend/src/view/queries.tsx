import { webAddress } from "../addresses";
import { queryName } from "../attention";
import { count, milliseconds, rate } from "../format";
import { passes } from "../filter";
import { queryKey } from "../keys";
import type { Query, QueryState, Snapshot } from "../snapshot";
import type { Shared } from "./app";
import { Icon, type IconName } from "./icon";
import { Mark, type Tone } from "./mark";
import { Nothing } from "./nothing";
import { QueryDetail } from "./query-detail";
import { Section } from "./section";
import { type Column, numbers, Table } from "./table";
import { Time } from "./time";

const MOST = 40;

const STATES: Record<QueryState, [Tone, IconName]> = {
  running: ["good", "dot"],
  stopped: ["calm", "square"],
  failed: ["bad", "cross"],
  silent: ["warn", "clock"],
  "files only": ["calm", "note"],
};

export function Queries({ state, act, snapshot }: Shared & { snapshot: Snapshot }) {
  const all = snapshot.queries;
  const queries = all.filter((query) =>
    passes(state.filter, query.name, query.id, query.engine, query.state, query.source, query.sink, query.checkpoint),
  );
  return (
    <Section name="queries" title="Queries" total={all.length} passing={queries.length}>
      {queries.length ? (
        <Table
          section="queries"
          caption="Queries of both engines, failed and silent ones first; numbers of the newest batch or epoch"
          head={{ title: "Query", by: queryName, cell: (query) => <bdi>{queryName(query)}</bdi> }}
          columns={columns(snapshot.taken_at)}
          rows={queries}
          keyOf={queryKey}
          tone={(query) => (query.state === "failed" ? "bad" : query.state === "silent" ? "warn" : undefined)}
          below={(query) => query.state === "failed" && query.last_error && <LastError query={query} now={snapshot.taken_at} />}
          detail={(query) => <QueryDetail query={query} now={snapshot.taken_at} />}
          most={MOST}
          state={state}
          act={act}
        />
      ) : (
        <Nothing filter={state.filter} total={all.length}>
          <p>
            No query has reported to this store yet. Pipelines report to the store of their sink; other streaming queries report after{" "}
            <code>penstock.monitor(spark, url="…")</code>. To show a query by its files, start the page with{" "}
            <code>penstock ui --checkpoint PATH</code>.
          </p>
        </Nothing>
      )}
    </Section>
  );
}

function columns(now: string): Column<Query>[] {
  return [
    { id: "state", title: "State", by: (query) => query.state, cell: (query) => <State query={query} /> },
    { id: "engine", title: "Engine", leaves: "first", by: (query) => query.engine, cell: (query) => query.engine },
    {
      id: "batch",
      title: "Batch, epoch",
      hint: "The last batch of a micro-batch query, or epoch of a continuous one",
      numeric: true,
      by: (query) => query.batch,
      cell: (query) => (
        <>
          <span class="quiet">{query.unit}</span> {count(query.batch)}
        </>
      ),
    },
    numbers("in", "Rows in", (query) => query.rows_in, count, { hint: "Rows read since the previous report", leaves: "second" }),
    numbers("out", "Rows out", (query) => query.rows_out, count, { hint: "Rows written since the previous report", leaves: "second" }),
    numbers("rate", "Rows/s", (query) => query.rows_in_per_second, rate, { hint: "Rows read per second" }),
    numbers("duration", "Duration", duration, milliseconds, { hint: "Of the last batch or epoch as a whole", leaves: "first" }),
    percentile("p50", "half", "first"),
    percentile("p99", "99 of 100", "second"),
    {
      id: "watermark",
      title: "Watermark",
      numeric: true,
      leaves: "first",
      by: (query) => query.watermark,
      cell: (query) => <Time at={query.watermark} now={now} />,
    },
    numbers("rows", "State rows", (query) => query.state_rows, count, { leaves: "first" }),
    {
      id: "updated",
      title: "Last heard",
      hint: "When the query last reported, or last wrote to its checkpoint",
      numeric: true,
      leaves: "second",
      by: (query) => query.updated_at,
      cell: (query) => <Time at={query.updated_at} now={now} />,
    },
    { id: "spark", title: "Spark", leaves: "second", cell: (query) => <SparkPage query={query} /> },
  ];
}

/** Of rows' latency where it is known, which is in a continuous query; else of how long micro-batches took, and then it says so. */
function percentile(name: "p50" | "p99", share: string, leaves: "first" | "second"): Column<Query> {
  return {
    id: name,
    title: name,
    hint: `Continuous queries: ${share} of the rows of the last epoch were visible within this time. Micro-batch queries (marked as batch): ${share} of the newest micro-batches took no longer`,
    numeric: true,
    leaves,
    by: ({ latency_ms: latency, batch_duration_ms: batches }) => (latency ?? batches)?.[name],
    cell: ({ latency_ms: latency, batch_duration_ms: batches }) =>
      latency || !batches ? (
        milliseconds(latency?.[name])
      ) : (
        <span title="Micro-batch duration, not the latency of a row">
          <span class="quiet">batch</span> {milliseconds(batches[name])}
        </span>
      ),
  };
}

/** How long the last batch or epoch took in all: Spark calls the whole of a micro-batch `triggerExecution`. */
function duration(query: Query): number | null {
  return query.duration_ms?.triggerExecution ?? query.history.at(-1)?.duration_ms ?? null;
}

function State({ query }: { query: Query }) {
  const [tone, icon] = STATES[query.state] ?? (["calm", "note"] as const);
  return (
    <Mark tone={tone} icon={icon} title={query.state === "files only" ? "Known only from its checkpoint: whether it is running is unknown" : undefined}>
      {query.state}
    </Mark>
  );
}

function LastError({ query, now }: { query: Query; now: string }) {
  const error = query.last_error;
  if (!error) return null;
  return (
    <p class="error" title={error.message}>
      {error.condition && <code>{error.condition}</code>} <span>{error.message}</span> <Time at={error.at} now={now} />
    </p>
  );
}

export function SparkPage({ query }: { query: Query }) {
  const address = webAddress(query.spark_ui);
  if (address === null) return null;
  return (
    <a href={address} target="_blank" rel="noopener noreferrer" aria-label={`Spark's page of ${queryName(query)}`}>
      page
      <Icon name="away" />
    </a>
  );
}
