import { expect, test } from "vitest";
import { webAddress } from "./addresses";
import { backoff } from "./backoff";
import { passes } from "./filter";
import { detailId, expanderId } from "./keys";
import { local, parsed, utc } from "./times";

test("links lead to http and https alone", () => {
  expect(webAddress("http://127.0.0.1:4040")).toBe("http://127.0.0.1:4040");
  expect(webAddress("https://spark.example/")).toBe("https://spark.example/");
  for (const address of ["javascript:alert(1)", "JAVASCRIPT:alert(1)", "data:text/html,x", "//host", "", null]) {
    expect(webAddress(address)).toBeNull();
  }
});

test("waiting doubles up to ten seconds, and a fifth of it is chance", () => {
  expect([1, 2, 3, 4, 5, 6, 60].map((attempt) => backoff(attempt, () => 1))).toEqual([500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
  expect(backoff(1, () => 0)).toBe(400);
});

test("a filter wants each of its words somewhere, in any case", () => {
  expect(passes("", "orders")).toBe(true);
  expect(passes("  ORD bill ", "orders", null, "billing")).toBe(true);
  expect(passes("orders x", "orders", "billing")).toBe(false);
});

test("ids of any name have no blanks, and tell sections apart", () => {
  const target = { section: "queues", key: `a "b" <c>` } as const;
  expect(expanderId(target)).not.toMatch(/[\s"<>]/);
  expect(detailId(target)).not.toBe(detailId({ ...target, section: "consumers" }));
});

test("a time is short today, has its day before, and its year long ago", () => {
  const now = new Date(2026, 10, 23, 12, 0, 0);
  expect(local(new Date(2026, 10, 23, 6, 40, 12), now)).toBe("06:40:12");
  expect(local(new Date(2026, 10, 22, 6, 40, 12), now)).toBe("22 Nov, 06:40");
  expect(local(new Date(2025, 10, 22, 6, 40, 12), now)).toBe("22 Nov 2025");
});

test("what is no time is none", () => {
  expect(parsed("soon")).toBeNull();
  expect(parsed(null)).toBeNull();
  expect(utc(parsed("2026-11-23T06:40:00.123Z")!)).toBe("2026-11-23 06:40:00 UTC");
});
