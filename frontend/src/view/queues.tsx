import { age, bytes, count, counted, rate } from "../format";
import { passes } from "../filter";
import { queueKey } from "../keys";
import { seconds } from "../times";
import type { Queue, Snapshot } from "../snapshot";
import type { Shared } from "./app";
import { Chart } from "./chart";
import { code, Facts } from "./facts";
import { Nothing } from "./nothing";
import { PlainTable } from "./plain-table";
import { Section } from "./section";
import { Sparkline } from "./sparkline";
import { type Column, numbers, Table } from "./table";
import { Time, timed } from "./time";

const MOST = 40;

export function Queues({ state, act, snapshot }: Shared & { snapshot: Snapshot }) {
  const queues = snapshot.queues.filter((queue) => passes(state.filter, queue.name));
  return (
    <Section name="queues" title="Queues" total={snapshot.queues.length} passing={queues.length}>
      {queues.length ? (
        <Table
          section="queues"
          caption="Queues, with their size and rate of growth"
          head={{ title: "Queue", by: (queue) => queue.name, cell: (queue) => <bdi>{queue.name}</bdi> }}
          columns={columns(snapshot.taken_at)}
          rows={queues}
          keyOf={queueKey}
          detail={(queue) => <About queue={queue} now={snapshot.taken_at} />}
          most={MOST}
          state={state}
          act={act}
        />
      ) : (
        <Nothing filter={state.filter} total={snapshot.queues.length}>
          <p>
            The store has no queue yet. Make one with <code>store.create_queue("orders", schema)</code> in Python, or with{" "}
            <code>penstock queue create orders --schema "id bigint, amount double"</code>.
          </p>
        </Nothing>
      )}
    </Section>
  );
}

function columns(now: string): Column<Queue>[] {
  return [
    numbers("rows", "Rows", (queue) => queue.rows, count),
    numbers("bytes", "Size", (queue) => queue.bytes, bytes),
    numbers("rate", "Rows/s", (queue) => queue.rows_per_second, rate, { hint: "Rows appended per second, between two snapshots" }),
    {
      id: "course",
      title: "Trend",
      leaves: "second",
      cell: (queue) => <Sparkline values={queue.history.map((point) => point.rows_per_second)} />,
    },
    numbers("oldest", "Oldest row", (queue) => queue.oldest_seconds, age, {
      hint: "Age of the oldest row in the queue",
      leaves: "second",
    }),
    {
      id: "appended",
      title: "Last append",
      numeric: true,
      leaves: "first",
      by: (queue) => queue.last_append_at,
      cell: (queue) => <Time at={queue.last_append_at} now={now} />,
    },
    numbers("partitions", "Partitions", (queue) => queue.partitions.length, count, { leaves: "first" }),
    { id: "keeps", title: "Keeps", hint: "Retention: the most that each partition keeps", leaves: "first", cell: keeps },
  ];
}

function keeps({ keeps: { rows, age_seconds, bytes: size } }: Queue): string {
  const bounds = [rows != null && counted(rows, "row"), age_seconds != null && age(age_seconds), size != null && bytes(size)];
  return bounds.filter(Boolean).join(", ") || "all rows";
}

function About({ queue, now }: { queue: Queue; now: string }) {
  const rates = queue.history.map((point) => point.rows_per_second);
  return (
    <div class="detail">
      <Facts
        of={[
          ["Key", queue.key.length ? code(queue.key.join(", ")) : "none"],
          ["Keeps", keeps(queue)],
          ["Last append", timed(queue.last_append_at, now)],
          ["Oldest row", timed(queue.oldest_at, now)],
          ["Growth", queue.bytes_per_second == null ? null : `${bytes(queue.bytes_per_second)}/s`],
        ]}
      />
      <div class="charts">
        <Chart
          title="Appended"
          at={queue.history.map((point) => seconds(point.at))}
          lines={[{ label: "rows/s", values: rates }]}
          format={rate}
          group={`queue ${queue.name}`}
        />
      </div>
      <PlainTable
        caption={`Partitions of ${queue.name}`}
        titles={["#Partition", "#First index", "#Next index", "#Rows", "#Size", "#Segments", "#Oldest row"]}
        rows={queue.partitions.map((part) => ({
          key: String(part.partition),
          cells: [
            count(part.partition),
            count(part.first_index),
            count(part.next_index),
            count(part.rows),
            bytes(part.bytes),
            count(part.segments),
            <Time at={part.oldest_at} now={now} />,
          ],
        }))}
      />
    </div>
  );
}
