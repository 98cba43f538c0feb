import { expect, test } from "vitest";
import { connected, firstState, heard, paused, reordered, revealed, shownWhole, toggled } from "./page-state";
import { queue, snapshot } from "./sample";

const first = firstState("system");
const now = new Date();
const rows = (count: number) => snapshot({ queues: [queue({ rows: count })] });
const lost = { state: "lost", reason: "The stream ended", retryAt: null } as const;

test("a paused page keeps what it shows, and shows the newest when it goes on", () => {
  const held = heard(paused(heard(first, rows(1), now), true), rows(2), now);
  expect(held.shown?.queues[0]?.rows).toBe(1);
  expect(paused(held, false).shown?.queues[0]?.rows).toBe(2);
});

test("a lost connection is announced once, and so is its return", () => {
  expect(connected(first, { state: "live" }).announcement).toBe("");
  const gone = connected(connected(first, { state: "live" }), lost);
  expect(gone.announcement).toBe("Not live. The stream ended.");
  expect(connected({ ...gone, announcement: "" }, lost).announcement).toBe("");
  expect(connected(gone, { state: "live" }).announcement).toBe("Live again.");
});

test("what was wrong before a page was paused is not announced as new after it", () => {
  const notes = snapshot({ dead_letters: [{ queue: "refused", rows: 1, last_append_at: null, newest: [] }] });
  const shown = heard(first, notes, now);
  expect(paused(heard(paused({ ...shown, announcement: "" }, true), notes, now), false).announcement).toBe("");
});

test("a row opens and closes", () => {
  const target = { section: "queues", key: "orders" } as const;
  expect(toggled(first, target).open.size).toBe(1);
  expect(toggled(toggled(first, target), target).open.size).toBe(0);
});

test("a row that is taken to is open, whatever the filter or the cut of its table", () => {
  const state = revealed({ ...first, filter: "x" }, { section: "queries", key: "q" });
  expect(state.filter).toBe("");
  expect([...state.whole]).toEqual(["queries"]);
  expect([...state.open]).toEqual(["queries/q"]);
  expect(shownWhole(state, "queries", false).whole.size).toBe(0);
});

test("each section has an order of its own", () => {
  const state = reordered(reordered(first, "queues", "rows"), "ledger", "batch");
  expect(state.orders.get("queues")?.column).toBe("rows");
  expect(reordered(reordered(state, "queues", "rows"), "queues", "rows").orders.has("queues")).toBe(false);
});
