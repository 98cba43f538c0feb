import { expect, test } from "vitest";
import { known, summed, thinned } from "./series";

test("thinning keeps every peak", () => {
  const values = Array.from({ length: 900 }, (_, i) => (i === 437 ? 100 : 1));
  const thin = thinned(values, 48);
  expect(thin).toHaveLength(48);
  expect(Math.max(...thin.map(Number))).toBe(100);
});

test("few points stay as they are, gaps too", () => {
  expect(thinned([1, null, 3], 48)).toEqual([1, null, 3]);
  expect(thinned([null, null, 5, null], 2)).toEqual([null, 5]);
});

test("sums count back from the end that histories share", () => {
  expect(summed([[1, 2, 3], [10], []])).toEqual([1, 2, 13]);
  expect(summed([[null, 2], [null, null]])).toEqual([null, 2]);
  expect(summed([])).toEqual([]);
});

test("a history without any value is not known", () => {
  expect(known([null, null])).toBe(false);
  expect(known([null, 0])).toBe(true);
});
