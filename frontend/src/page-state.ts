/** All that the page shows, in one value. */
import { attention, type Attention } from "./attention";
import { changes } from "./announce";
import type { SectionName, Target } from "./keys";
import { targetKey } from "./keys";
import type { Connection } from "./live";
import { type Order, pressed } from "./order";
import type { Scheme } from "./scheme";
import type { Snapshot } from "./snapshot";

export interface PageState {
  /** The snapshot that is on the page; while it is paused, not the newest. */
  shown: Snapshot | null;
  attention: Attention[];
  connection: Connection;
  /** When the newest snapshot came, by this machine's clock. */
  heardAt: Date | null;
  newest: Snapshot | null;
  paused: boolean;
  filter: string;
  open: ReadonlySet<string>;
  whole: ReadonlySet<SectionName>;
  orders: ReadonlyMap<SectionName, Order>;
  scheme: Scheme;
  announcement: string;
}

export function firstState(scheme: Scheme): PageState {
  return {
    shown: null,
    attention: [],
    connection: { state: "connecting" },
    heardAt: null,
    newest: null,
    paused: false,
    filter: "",
    open: new Set(),
    whole: new Set(),
    orders: new Map(),
    scheme,
    announcement: "",
  };
}

export function heard(state: PageState, snapshot: Snapshot, now: Date): PageState {
  const newer = { ...state, newest: snapshot, heardAt: now };
  return state.paused ? newer : show(newer, snapshot);
}

function show(state: PageState, snapshot: Snapshot): PageState {
  const found = attention(snapshot);
  const said = changes(state.shown && state.attention, found).join(" ");
  return { ...state, shown: snapshot, attention: found, announcement: said || state.announcement };
}

export function connected(state: PageState, connection: Connection): PageState {
  return { ...state, connection, announcement: told(state.connection, connection) ?? state.announcement };
}

function told(before: Connection, after: Connection): string | null {
  if (after.state === "live" && before.state === "lost") return "Live again.";
  return after.state === "lost" && before.state !== "lost" ? `Not live. ${after.reason}.` : null;
}

export function paused(state: PageState, hold: boolean): PageState {
  const held = { ...state, paused: hold };
  return !hold && state.newest ? show(held, state.newest) : held;
}

export function toggled(state: PageState, target: Target): PageState {
  const open = new Set(state.open);
  const key = targetKey(target);
  if (!open.delete(key)) open.add(key);
  return { ...state, open };
}

/** The state in which the target is sure to be on the page, opened. */
export function revealed(state: PageState, target: Target): PageState {
  return {
    ...state,
    filter: "",
    open: new Set(state.open).add(targetKey(target)),
    whole: new Set(state.whole).add(target.section),
  };
}

export function shownWhole(state: PageState, section: SectionName, whole: boolean): PageState {
  const sections = new Set(state.whole);
  if (whole) sections.add(section);
  else sections.delete(section);
  return { ...state, whole: sections };
}

export function reordered(state: PageState, section: SectionName, column: string): PageState {
  const orders = new Map(state.orders);
  const order = pressed(orders.get(section) ?? null, column);
  if (order) orders.set(section, order);
  else orders.delete(section);
  return { ...state, orders };
}
