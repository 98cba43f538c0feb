import { expect, test } from "vitest";
import { attention } from "./attention";
import { changes } from "./announce";
import { consumer, query, snapshot } from "./sample";

const error = { condition: "QUERY_FAILED", message: "The sink is gone.\nat line 2", at: null };
const letters = { queue: "refused", rows: 12, last_append_at: null, newest: [{ at: null, reason: "no key", value: null }] };

test("the worst comes first, and what is well is not there", () => {
  const found = attention(
    snapshot({
      store: { url: "sqlite:///shop.db", kind: "sqlite", error: "The store does not answer." },
      queries: [
        query({ id: "1", state: "silent" }),
        query({ id: "2", state: "failed", last_error: error }),
        query({ id: "3" }),
        query({ id: "4", state: "files only" }),
      ],
      consumers: [consumer(), consumer({ consumer: "audit", stuck: true, stuck_seconds: 75, lag_rows: 1200 })],
      dead_letters: [letters, { ...letters, queue: "empty", rows: 0 }],
      notes: ["No checkpoint at /data/x."],
    }),
  );
  expect(found.map((item) => item.concern)).toEqual(["store", "failed", "stuck", "silent", "dead-letters", "note"]);
  expect(found.map((item) => item.says)).toEqual([
    "The store does not answer.",
    "QUERY_FAILED: The sink is gone.",
    "1,200 rows of orders wait, and the offset has not moved for 1 min 15 s.",
    "No report for 1 min. It was at batch 412.",
    "12 rows refused. The newest: no key",
    "No checkpoint at /data/x.",
  ]);
});

test("a condition that the message begins with is not said twice", () => {
  const [item] = attention(snapshot({ queries: [query({ state: "failed", last_error: { ...error, message: "QUERY_FAILED: gone" } })] }));
  expect(item?.says).toBe("QUERY_FAILED: gone");
});

test("the first look says how much is wrong, later ones what changed, and numbers are not announced", () => {
  const stuck = (seconds: number) => attention(snapshot({ consumers: [consumer({ stuck: true, stuck_seconds: seconds })] }));
  const failed = attention(snapshot({ queries: [query({ state: "failed" })], notes: ["remark"] }));
  expect(changes(null, [])).toEqual([]);
  expect(changes(null, failed)).toEqual(["1 thing needs attention"]);
  expect(changes(stuck(61), stuck(62))).toEqual([]);
  expect(changes(stuck(61), failed)).toEqual(["Failed: large.", "No longer stuck: billing."]);
});

test("a query that fails again in another run is announced again", () => {
  const run = (id: string) => attention(snapshot({ queries: [query({ state: "failed", run_id: id })] }));
  expect(changes(run("1"), run("2"))).toContain("Failed: large.");
});
