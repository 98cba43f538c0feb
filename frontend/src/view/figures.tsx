import type { ComponentChildren } from "preact";
import { age, bytes, count, counted, rate, UNKNOWN } from "../format";
import { summed, type Values } from "../series";
import type { QueryState, Snapshot } from "../snapshot";
import { Sparkline } from "./sparkline";

/** The whole store in a line of numbers. */
export function Figures({ snapshot }: { snapshot: Snapshot }) {
  const { queues, consumers, queries } = snapshot;
  const lag = total(consumers.map((consumer) => consumer.lag_rows));
  const oldest = greatest(consumers.map((consumer) => consumer.lag_seconds));
  return (
    <dl class="figures">
      <Figure
        name="Appended"
        course={summed(queues.map((queue) => queue.history.map((point) => point.rows_per_second)))}
        more={perSecond(total(queues.map((queue) => queue.bytes_per_second)))}
      >
        {rate(total(queues.map((queue) => queue.rows_per_second)))} <small>rows/s</small>
      </Figure>
      <Figure
        name="Waiting for consumers"
        course={summed(consumers.map((consumer) => consumer.history.map((point) => point.lag_rows)))}
        more={oldest ? `the oldest for ${age(oldest)}` : "no lag"}
      >
        {count(lag)} <small>{lag === 1 ? "row" : "rows"}</small>
      </Figure>
      <Figure name="Held in queues" more={`in ${counted(queues.length, "queue")}`}>
        {bytes(total(queues.map((queue) => queue.bytes)))} <small>{counted(total(queues.map((queue) => queue.rows)), "row")}</small>
      </Figure>
      <Figure name="Queries" more={otherStates(snapshot)}>
        {count(inState(snapshot, "running"))} <small>of {count(queries.length)} running</small>
      </Figure>
    </dl>
  );
}

interface FigureProps {
  name: string;
  more: string;
  course?: Values;
  children: ComponentChildren;
}

function Figure({ name, more, course, children }: FigureProps) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>
        <span class="value">{children}</span>
        {course && <Sparkline values={course} most={60} />}
        <span class="more">{more}</span>
      </dd>
    </div>
  );
}

function total(values: (number | null)[]): number | null {
  const there = values.filter((value) => value != null);
  return there.length || !values.length ? there.reduce((sum, value) => sum + value, 0) : null;
}

function greatest(values: (number | null)[]): number {
  return values.reduce<number>((most, value) => Math.max(most, value ?? 0), 0);
}

function perSecond(size: number | null): string {
  return size == null ? UNKNOWN : `${bytes(size)}/s`;
}

function inState(snapshot: Snapshot, state: QueryState): number {
  return snapshot.queries.filter((query) => query.state === state).length;
}

function otherStates(snapshot: Snapshot): string {
  const others = (["failed", "silent", "files only", "stopped"] as const).map((state) => [inState(snapshot, state), state] as const);
  return others.filter(([number]) => number).map(([number, state]) => `${count(number)} ${state}`).join(", ") || "none failed";
}
