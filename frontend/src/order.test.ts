import { expect, test } from "vitest";
import { ordered, pressed } from "./order";

test("a header sorts down, then up, then gives the server's order back", () => {
  const first = pressed(null, "rows");
  const second = pressed(first, "rows");
  expect(first).toEqual({ column: "rows", descending: true });
  expect(second).toEqual({ column: "rows", descending: false });
  expect(pressed(second, "rows")).toBeNull();
  expect(pressed(second, "name")).toEqual({ column: "name", descending: true });
});

test("rows without a value come last both ways, and equal rows keep their places", () => {
  const rows: [string, number | null][] = [["a", null], ["b", 1], ["c", 2], ["d", 1]];
  const names = (descending: boolean) => ordered(rows, (row) => row[1], descending).map((row) => row[0]);
  expect(names(true)).toEqual(["c", "b", "d", "a"]);
  expect(names(false)).toEqual(["b", "d", "c", "a"]);
});

test("names with numbers go by the numbers", () => {
  expect(ordered(["q10", "q9", "q100"], (name) => name, false)).toEqual(["q9", "q10", "q100"]);
});
