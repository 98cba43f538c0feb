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
import { type Column, Table } from "./table";
import { Time } from "./time";

const MOST = 40;

const STATES: Record<QueryState, [Tone, IconName]> = {
  running: ["good", "dot"],
  stopped: ["calm", "square"],
  failed: ["bad", "cross"],
  silent: ["warn", "clock"],
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
          caption="Queries of both engines, failed and silent ones first; numbers are of the newest batch or epoch"
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
            No query has told this store of itself. Each one of <code>ps.stream(…).start(…)</code> tells the store of its sink; other
            streaming queries do after <code>ps.publish(spark, url="…")</code>. To show one by its files, start the page with{" "}
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
    {
      id: "in",
      title: "Rows in",
      hint: "Rows read since the query told before",
      numeric: true,
      leaves: "second",
      by: (query) => query.rows_in,
      cell: (query) => count(query.rows_in),
    },
    {
      id: "out",
      title: "Rows out",
      hint: "Rows written since the query told before",
      numeric: true,
      leaves: "second",
      by: (query) => query.rows_out,
      cell: (query) => count(query.rows_out),
    },
    {
      id: "rate",
      title: "Rows/s",
      hint: "Rows read in a second",
      numeric: true,
      by: (query) => query.rows_in_per_second,
      cell: (query) => rate(query.rows_in_per_second),
    },
    {
      id: "duration",
      title: "Duration",
      hint: "Of the last batch or epoch as a whole",
      numeric: true,
      leaves: "first",
      by: duration,
      cell: (query) => milliseconds(duration(query)),
    },
    {
      id: "p50",
      title: "p50",
      hint: "Latency that half of the rows of the last batch or epoch stayed below",
      numeric: true,
      leaves: "first",
      by: (query) => query.latency_ms?.p50,
      cell: (query) => milliseconds(query.latency_ms?.p50),
    },
    {
      id: "p99",
      title: "p99",
      hint: "Latency that 99 of 100 rows of the last batch or epoch stayed below",
      numeric: true,
      leaves: "second",
      by: (query) => query.latency_ms?.p99,
      cell: (query) => milliseconds(query.latency_ms?.p99),
    },
    {
      id: "watermark",
      title: "Watermark",
      numeric: true,
      leaves: "first",
      by: (query) => query.watermark,
      cell: (query) => <Time at={query.watermark} now={now} />,
    },
    { id: "rows", title: "State rows", numeric: true, leaves: "first", by: (query) => query.state_rows, cell: (query) => count(query.state_rows) },
    {
      id: "updated",
      title: "Last heard",
      hint: "When the query last told of itself",
      numeric: true,
      leaves: "second",
      by: (query) => query.updated_at,
      cell: (query) => <Time at={query.updated_at} now={now} />,
    },
    { id: "spark", title: "Spark", leaves: "second", cell: (query) => <SparkPage query={query} /> },
  ];
}

/** How long the last batch or epoch took in all: Spark calls the whole of a micro-batch `triggerExecution`. */
function duration(query: Query): number | null {
  return query.duration_ms?.triggerExecution ?? query.history.at(-1)?.duration_ms ?? null;
}

function State({ query }: { query: Query }) {
  const [tone, icon] = STATES[query.state] ?? (["calm", "note"] as const);
  return (
    <Mark tone={tone} icon={icon}>
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
