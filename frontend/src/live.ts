/** The stream of snapshots, kept up: what breaks is tried again, and a stream that says nothing counts as broken. */
import { backoff } from "./backoff";
import type { Snapshot } from "./snapshot";

export type Connection =
  | { state: "connecting" }
  | { state: "live" }
  | { state: "lost"; reason: string; retryAt: Date | null };

export interface Listener {
  snapshot(snapshot: Snapshot): void;
  connection(connection: Connection): void;
}

/** A live stream sends at least every `every_seconds`; if it is silent for this much longer, it counts as broken. */
const PATIENCE = { times: 4, least: 6_000 };

export class Live {
  private source: EventSource | null = null;
  private retry: ReturnType<typeof setTimeout> | undefined;
  private watchdog: ReturnType<typeof setTimeout> | undefined;
  private attempt = 0;
  private patience = 15_000;

  constructor(private readonly listener: Listener) {}

  /** Connect now, whatever is under way. */
  connect(): void {
    this.close();
    const source = new EventSource("/api/events");
    this.source = source;
    source.addEventListener("snapshot", (event) => this.heard(JSON.parse(event.data) as Snapshot));
    source.addEventListener("error", () => void this.broke(source));
    this.watch();
  }

  private heard(snapshot: Snapshot): void {
    this.attempt = 0;
    this.patience = Math.max(PATIENCE.least, snapshot.every_seconds * 1000 * PATIENCE.times);
    this.watch();
    this.listener.connection({ state: "live" });
    this.listener.snapshot(snapshot);
  }

  private watch(): void {
    clearTimeout(this.watchdog);
    const source = this.source;
    this.watchdog = setTimeout(() => {
      if (source) this.lost(source, `No data for ${Math.round(this.patience / 1000)} seconds`);
    }, this.patience);
  }

  private async broke(source: EventSource): Promise<void> {
    // EventSource would try again by itself, but at one pace, without end, and without saying why.
    source.close();
    this.lost(source, await whyNot());
  }

  private lost(source: EventSource, reason: string): void {
    if (source !== this.source) return;
    this.close();
    this.attempt += 1;
    const wait = backoff(this.attempt);
    this.retry = setTimeout(() => this.connect(), wait);
    this.listener.connection({ state: "lost", reason, retryAt: new Date(Date.now() + wait) });
  }

  private close(): void {
    clearTimeout(this.retry);
    clearTimeout(this.watchdog);
    this.source?.close();
    this.source = null;
  }
}

/** An EventSource does not say why it failed; an ordinary request does. */
async function whyNot(): Promise<string> {
  const asking = new AbortController();
  try {
    const answer = await fetch("/api/snapshot", { cache: "no-store", signal: AbortSignal.any([asking.signal, AbortSignal.timeout(5_000)]) });
    if (answer.ok) return "The stream ended";
    return (await answer.text()).trim().slice(0, 300) || `The server responded with ${answer.status}`;
  } catch {
    return "The server does not respond";
  } finally {
    asking.abort();
  }
}
