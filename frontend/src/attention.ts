/** What somebody should look at first, worst first. */
import { age, count, counted } from "./format";
import { consumerKey, queryKey, type Target } from "./keys";
import type { Consumer, DeadLetters, Query, Snapshot } from "./snapshot";

export type Concern = "store" | "failed" | "stuck" | "silent" | "dead-letters" | "note";

export interface Attention {
  /** The same for as long as the same thing is wrong. */
  id: string;
  concern: Concern;
  subject: string;
  says: string;
  target: Target | null;
}

export const WORDS: Record<Concern, string> = {
  store: "Store",
  failed: "Failed",
  stuck: "Stuck",
  silent: "Silent",
  "dead-letters": "Dead letters",
  note: "Note",
};

export function attention(snapshot: Snapshot): Attention[] {
  return [
    ...storeError(snapshot),
    ...snapshot.queries.filter((query) => query.state === "failed").map(failed),
    ...snapshot.consumers.filter((consumer) => consumer.stuck).map(stuck),
    ...snapshot.queries.filter((query) => query.state === "silent").map((query) => silent(query, snapshot.taken_at)),
    ...snapshot.dead_letters.filter((letters) => letters.rows > 0).map(refused),
    ...snapshot.notes.map(note),
  ];
}

/** Whether it is more than a remark. */
export function pressing(item: Attention): boolean {
  return item.concern !== "note";
}

export function queryName(query: Query): string {
  return query.name || query.checkpoint || query.id;
}

function storeError({ store }: Snapshot): Attention[] {
  if (!store.error) return [];
  return [{ id: "store", concern: "store", subject: store.url, says: store.error, target: null }];
}

function failed(query: Query): Attention {
  const error = query.last_error;
  const condition = error?.condition && !error.message.startsWith(error.condition) ? `${error.condition}: ` : "";
  const says = error ? `${condition}${firstLine(error.message)}` : "It failed without an error message.";
  return about("failed", query, queryName(query), says);
}

function silent(query: Query, takenAt: string): Attention {
  const since = query.updated_at ? (Date.parse(takenAt) - Date.parse(query.updated_at)) / 1000 : null;
  const at = query.batch == null ? "" : ` It was at ${query.unit} ${count(query.batch)}.`;
  return about("silent", query, queryName(query), `${since == null ? "No report for a long time" : `No report for ${age(since)}`}.${at}`);
}

function about(concern: Concern, query: Query, subject: string, says: string): Attention {
  const key = queryKey(query);
  return { id: `${concern}/${key}/${query.run_id}`, concern, subject, says, target: { section: "queries", key } };
}

function stuck(consumer: Consumer): Attention {
  const key = consumerKey(consumer);
  const still = consumer.stuck_seconds == null ? "" : ` for ${age(consumer.stuck_seconds)}`;
  return {
    id: `stuck/${key}`,
    concern: "stuck",
    subject: consumer.consumer,
    says: `${counted(consumer.lag_rows, "row")} of ${consumer.queue} ${consumer.lag_rows === 1 ? "waits" : "wait"}, and the offset has not moved${still}.`,
    target: { section: "consumers", key },
  };
}

function refused(letters: DeadLetters): Attention {
  const reason = letters.newest[0]?.reason;
  return {
    id: `dead-letters/${letters.queue}`,
    concern: "dead-letters",
    subject: letters.queue,
    says: `${counted(letters.rows, "row")} refused.${reason ? ` The newest: ${firstLine(reason)}` : ""}`,
    target: { section: "dead-letters", key: letters.queue },
  };
}

function note(text: string): Attention {
  return { id: `note/${text}`, concern: "note", subject: "", says: text, target: null };
}

export function firstLine(text: string): string {
  return text.split("\n", 1)[0] ?? "";
}
