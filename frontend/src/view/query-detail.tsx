import { webAddress } from "../addresses";
import { bytes, count, milliseconds } from "../format";
import { queryKey } from "../keys";
import { known } from "../series";
import { seconds } from "../times";
import type { Percentiles, Query, QueryPoint } from "../snapshot";
import { Chart } from "./chart";
import { code, Facts } from "./facts";
import { Time, timed } from "./time";

type Format = (value: number | null | undefined) => string;
type Measure = Exclude<keyof QueryPoint, "at">;

/** What each chart shows; one without any value is left out. */
const CHARTS: { title: string; lines: [label: string, measure: Measure][]; format: Format }[] = [
  { title: "Latency", lines: [["p50", "p50"], ["p99", "p99"]], format: milliseconds },
  { title: "Micro-batch duration", lines: [["p50", "batch_p50"], ["p99", "batch_p99"]], format: milliseconds },
  { title: "Duration", lines: [["took", "duration_ms"]], format: milliseconds },
  { title: "Rows", lines: [["in", "rows_in"], ["out", "rows_out"]], format: count },
  { title: "State", lines: [["rows", "state_rows"]], format: count },
];

export function QueryDetail({ query, now }: { query: Query; now: string }) {
  const { latency_ms: latency, batch_duration_ms: batches } = query;
  const filesOnly = query.state === "files only";
  return (
    <div class="detail">
      {query.last_error && (
        <div class="last-error">
          <h3>
            Last error <Time at={query.last_error.at} now={now} />
          </h3>
          <pre tabIndex={0}>{[query.last_error.condition, query.last_error.message].filter(Boolean).join("\n")}</pre>
        </div>
      )}
      <Courses query={query} />
      <div class="beside">
        <Facts
          of={[
            ["Known by", filesOnly ? "its checkpoint only: whether it is running is unknown" : null],
            ["Engine", query.engine],
            ["Source", code(query.source)],
            ["Sink", code(query.sink)],
            ["Checkpoint", code(query.checkpoint)],
            ["Id", code(query.id)],
            ["Run", code(query.run_id)],
            ["Started", timed(query.started_at, now)],
            [filesOnly ? "Last written" : "Last heard", timed(query.updated_at, now)],
            ["Watermark", timed(query.watermark, now)],
            ["All changes until", timed(query.finalized_until, now)],
            ["Latency", latency && percentiles(latency)],
            ["Micro-batch duration", batches && `${percentiles(batches)}, of the newest ${count(batches.batches)} reported`],
            ["State", keptState(query)],
            ["Spark's page", sparkPage(query.spark_ui)],
          ]}
        />
        <Durations of={query.duration_ms} />
      </div>
    </div>
  );
}

function Courses({ query }: { query: Query }) {
  const { history } = query;
  const at = history.map((point) => seconds(point.at));
  const charts = CHARTS.map(({ lines, ...chart }) => ({
    ...chart,
    lines: lines.map(([label, measure]) => ({ label, values: history.map((point) => point[measure]) })),
  }));
  return (
    <div class="charts">
      {charts
        .filter(({ lines }) => lines.some(({ values }) => known(values)))
        .map((chart) => (
          <Chart key={chart.title} {...chart} at={at} group={`query ${queryKey(query)}`} />
        ))}
    </div>
  );
}

/** Rows are not known where nothing but files are. */
function keptState({ state_rows: rows, state_bytes: size }: Query): string | null {
  if (rows == null) return size == null ? null : bytes(size);
  return `${count(rows)} rows, ${bytes(size)}`;
}

function percentiles({ p50, p90, p99, max }: Percentiles): string {
  const all = Object.entries({ p50, p90, p99, max }).filter(([, value]) => value != null);
  return all.map(([name, value]) => `${name} ${milliseconds(value)}`).join(", ");
}

function sparkPage(address: string | null) {
  const safe = webAddress(address);
  if (safe === null) return code(address);
  return (
    <a href={safe} target="_blank" rel="noopener noreferrer">
      {safe}
    </a>
  );
}

/** Where the time of the last batch went, longest first. */
function Durations({ of }: { of: Query["duration_ms"] }) {
  const parts = Object.entries(of ?? {}).sort(([, left], [, right]) => right - left);
  const longest = parts[0]?.[1] || 1;
  if (parts.length < 2) return null;
  return (
    <div class="durations">
      <h3>Time spent in the last one</h3>
      <dl>
        {parts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>
              <span class="share" style={{ inlineSize: `${(100 * value) / longest}%` }} aria-hidden="true" />
              <span>{milliseconds(value)}</span>
            </dd>
          </div>
        ))}
      </dl>
    </div>
  );
}
