/** Points of a history, made ready for drawing. */

export type Values = (number | null)[];

/** At most `most` points, each the greatest of its share of the values: a peak is never lost. */
export function thinned(values: Values, most: number): Values {
  if (values.length <= most) return values;
  const share = values.length / most;
  return Array.from({ length: most }, (_, i) => greatest(values.slice(Math.floor(i * share), Math.floor((i + 1) * share))));
}

/** The sums of several histories, counted back from their common end; null where none has a value. */
export function summed(histories: Values[]): Values {
  const length = Math.max(0, ...histories.map((values) => values.length));
  return Array.from({ length }, (_, i) => {
    const there = histories.map((values) => values[values.length - length + i]).filter((value) => value != null);
    return there.length ? there.reduce((sum, value) => sum + value, 0) : null;
  });
}

export function known(values: Values): boolean {
  return values.some((value) => value != null);
}

function greatest(values: Values): number | null {
  return values.reduce<number | null>((most, value) => (value != null && (most == null || value > most) ? value : most), null);
}
