import { describe, expect, test } from "vitest";
import { age, bytes, count, counted, milliseconds, rate, short, shortId, UNKNOWN } from "./format";

test("counts have separators, and say when they are not known", () => {
  expect([0, 999, 1234567].map(count)).toEqual(["0", "999", "1,234,567"]);
  expect(count(null)).toBe(UNKNOWN);
  expect(counted(1, "row")).toBe("1 row");
  expect(counted(2500, "query", "queries")).toBe("2,500 queries");
});

describe("sizes", () => {
  test.each([
    [0, "0 B"],
    [999, "999 B"],
    [1000, "1.0 kB"],
    [12_345, "12.3 kB"],
    [99_949, "99.9 kB"],
    [99_960, "100 kB"],
    [123_456, "123 kB"],
    [999_600, "1.0 MB"],
    [4.2e12, "4.2 TB"],
  ])("%d is %s", (size, text) => expect(bytes(size)).toBe(text));
});

describe("ages", () => {
  test.each([
    [-1, "0 s"],
    [0.04, "0 s"],
    [3.24, "3.2 s"],
    [9.96, "10 s"],
    [59.96, "1 min"],
    [61, "1 min 1 s"],
    [3_600, "1 h"],
    [97_200, "1 d 3 h"],
    [86_405, "1 d 5 s"],
  ])("%d s is %s", (seconds, text) => expect(age(seconds)).toBe(text));
});

test("rates have a digit behind the point only while they are small", () => {
  expect([0, 0.25, 9.94, 9.96, 1234.6].map(rate)).toEqual(["0", "0.3", "9.9", "10", "1,235"]);
});

test("milliseconds become an age from ten seconds on", () => {
  expect([0.42, 99.94, 230, 9_999, 75_000].map(milliseconds)).toEqual(["0.4 ms", "99.9 ms", "230 ms", "9,999 ms", "1 min 15 s"]);
});

test("numbers on axes are short", () => {
  expect([0, 2.5, 950, 1_200, 15_000_000, 3e12].map(short)).toEqual(["0", "2.5", "950", "1.2k", "15M", "3T"]);
});

test("a long id is cut, a short one stays", () => {
  expect(shortId("0f8fad5b-d9cb-469f-a165-70867728950e")).toBe("0f8fad5b…");
  expect(shortId("nightly")).toBe("nightly");
});
