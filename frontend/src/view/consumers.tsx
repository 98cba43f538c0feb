import type { Actions } from "../actions";
import { queryName } from "../attention";
import { age, bytes, count, shortId } from "../format";
import { passes } from "../filter";
import { consumerKey, queryKey } from "../keys";
import { seconds } from "../times";
import type { Consumer, Query, Snapshot } from "../snapshot";
import type { Shared } from "./app";
import { Chart } from "./chart";
import { code, Facts } from "./facts";
import { Mark } from "./mark";
import { Nothing } from "./nothing";
import { PlainTable } from "./plain-table";
import { Section } from "./section";
import { Sparkline } from "./sparkline";
import { type Column, numbers, Table } from "./table";

const MOST = 40;

export function Consumers({ state, act, snapshot }: Shared & { snapshot: Snapshot }) {
  const all = snapshot.consumers;
  const consumers = all.filter((one) => passes(state.filter, one.consumer, one.queue, one.stuck ? "stuck" : ""));
  const ownerOf = ownersAmong(snapshot.queries);
  return (
    <Section name="consumers" title="Consumers" total={all.length} passing={consumers.length}>
      {consumers.length ? (
        <Table
          section="consumers"
          caption="Consumers of queues: how far behind each is, stuck ones first"
          head={{ title: "Consumer", by: (one) => one.consumer, cell: (one) => <bdi>{one.consumer}</bdi> }}
          columns={columns(ownerOf, act)}
          rows={consumers}
          keyOf={consumerKey}
          tone={(one) => (one.stuck ? "bad" : undefined)}
          detail={(one) => <About one={one} query={ownerOf(one)} act={act} />}
          most={MOST}
          state={state}
          act={act}
        />
      ) : (
        <Nothing filter={state.filter} total={all.length}>
          <p>
            No consumer reads a queue yet. Register a consumer with{" "}
            <code>store.create_consumer("billing").register("orders")</code>, or with{" "}
            <code>penstock consumer create billing</code> and <code>penstock consumer register billing orders</code>.
          </p>
        </Nothing>
      )}
    </Section>
  );
}

function columns(ownerOf: OwnerOf, act: Actions): Column<Consumer>[] {
  return [
    { id: "queue", title: "Queue", by: (one) => one.queue, cell: (one) => <bdi>{one.queue}</bdi> },
    { id: "state", title: "State", by: place, cell: (one) => <State one={one} /> },
    numbers("rows", "Lag, rows", (one) => one.lag_rows, count),
    {
      id: "course",
      title: "Trend",
      leaves: "second",
      cell: (one) => <Sparkline values={one.history.map((point) => point.lag_rows)} />,
    },
    numbers("bytes", "Lag, size", (one) => one.lag_bytes, bytes, {
      hint: "Estimated: the size of the partitions, by the share of their rows that wait",
      leaves: "first",
    }),
    numbers("seconds", "Lag, time", (one) => one.lag_seconds, age, { hint: "Age of the oldest waiting row" }),
    {
      id: "vital",
      title: "Vital",
      hint: "Retention keeps the rows that a vital consumer has not read",
      leaves: "second",
      by: (one) => Number(one.vital),
      cell: (one) => (one.vital ? "vital" : "no"),
    },
    {
      id: "owner",
      title: "Owner",
      hint: "The query that reads with it",
      leaves: "first",
      by: (one) => ownerName(one, ownerOf(one)),
      cell: (one) => <Owner one={one} query={ownerOf(one)} act={act} />,
    },
  ];
}

function place(one: Consumer): number {
  return one.stuck ? 2 : one.lag_rows ? 1 : 0;
}

function State({ one }: { one: Consumer }) {
  if (one.stuck) {
    return (
      <Mark tone="bad" icon="halt" title="Rows wait, and the offset has not moved">
        stuck{one.stuck_seconds != null && ` ${age(one.stuck_seconds)}`}
      </Mark>
    );
  }
  if (one.lag_rows == null) return null;
  return one.lag_rows ? (
    <Mark tone="calm" icon="down">
      behind
    </Mark>
  ) : (
    <Mark tone="good" icon="check">
      caught up
    </Mark>
  );
}

type OwnerOf = (one: Consumer) => Query | undefined;

/** Finds the query that owns a consumer, where the page shows it. */
function ownersAmong(queries: Query[]): OwnerOf {
  const byId = new Map(queries.map((query) => [query.id, query]));
  return (one) => (one.owner?.app_id ? byId.get(one.owner.app_id) : undefined);
}

function ownerName({ owner }: Consumer, query: Query | undefined): string | null {
  return query ? queryName(query) : (owner?.query ?? owner?.app_id ?? null);
}

function Owner({ one, query, act }: { one: Consumer; query: Query | undefined; act: Actions }) {
  const { owner } = one;
  if (!owner) return <span class="quiet">nobody yet</span>;
  return (
    <span title={owner.app_id ?? undefined}>
      {query ? (
        <button type="button" class="link" onClick={() => act.reveal({ section: "queries", key: queryKey(query) })}>
          <bdi>{queryName(query)}</bdi>
        </button>
      ) : owner.app_id ? (
        <code>{shortId(owner.app_id)}</code>
      ) : (
        `epoch ${count(owner.epoch)}`
      )}{" "}
      {alive(owner.alive)}
    </span>
  );
}

function alive(is: boolean | null): string {
  return is == null ? "" : is ? "alive" : "gone";
}

function About({ one, query, act }: { one: Consumer; query: Query | undefined; act: Actions }) {
  return (
    <div class="detail">
      <Facts
        of={[
          ["Owner", one.owner ? <Owner one={one} query={query} act={act} /> : "nobody has owned it"],
          ["Owner's id", one.owner && code(one.owner.app_id)],
          ["Owner's epoch", one.owner && count(one.owner.epoch)],
          ["Vital", one.vital ? "yes: trimming waits for it" : "no: trimming does not wait for it"],
          ["Lag", `${count(one.lag_rows)} rows, about ${bytes(one.lag_bytes)}, ${age(one.lag_seconds)}`],
        ]}
      />
      <div class="charts">
        <Chart
          title="Lag"
          at={one.history.map((point) => seconds(point.at))}
          lines={[{ label: "rows", values: one.history.map((point) => point.lag_rows) }]}
          format={count}
          group={`consumer ${consumerKey(one)}`}
        />
      </div>
      <PlainTable
        caption={`Offsets of ${one.consumer} in ${one.queue}`}
        titles={["#Partition", "#Offset", "#Safe offset", "#Next index", "#Lag, rows"]}
        rows={one.partitions.map((part) => ({
          key: String(part.partition),
          cells: [part.partition, part.offset, part.safe_offset, part.next_index, part.lag_rows].map(count),
        }))}
      />
    </div>
  );
}
