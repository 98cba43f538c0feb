/** Numbers, sizes and ages in the words of the command line (`12.3 MB`, `2 d 3 h`). */

export const UNKNOWN = "–";

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function count(value: number | null | undefined): string {
  return value == null ? UNKNOWN : grouped.format(value);
}

/** `1 row`, `1,234 rows`; a noun that ends otherwise in the plural brings it along. */
export function counted(value: number | null | undefined, noun: string, plural = `${noun}s`): string {
  return value == null ? UNKNOWN : `${count(value)} ${value === 1 ? noun : plural}`;
}

/** A number in at most three digits before the point, for the axes of charts: `950`, `1.2k`, `15M`. */
export function short(value: number | null | undefined): string {
  if (value == null) return UNKNOWN;
  let amount = value;
  for (const unit of ["", "k", "M", "G"]) {
    if (Math.abs(amount) < 999.5) return `${trimmed(amount)}${unit}`;
    amount /= 1000;
  }
  return `${grouped.format(amount)}T`;
}

export function bytes(value: number | null | undefined): string {
  if (value == null) return UNKNOWN;
  let amount = value;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (amount < 999.5) return `${unit === "B" || amount >= 99.95 ? amount.toFixed(0) : amount.toFixed(1)} ${unit}`;
    amount /= 1000;
  }
  return `${amount.toFixed(1)} TB`;
}

/** Rows in a second: whole from ten on, one digit below. */
export function rate(value: number | null | undefined): string {
  if (value == null) return UNKNOWN;
  return value === 0 || value >= 9.95 ? count(Math.round(value)) : value.toFixed(1);
}

export function milliseconds(value: number | null | undefined): string {
  if (value == null) return UNKNOWN;
  if (value >= 9999.5) return age(value / 1000);
  return `${value >= 99.95 ? count(value) : value.toFixed(1)} ms`;
}

const UNITS: [string, number][] = [
  ["d", 86_400],
  ["h", 3_600],
  ["min", 60],
  ["s", 1],
];

/** A duration in its two greatest units. */
export function age(seconds: number | null | undefined): string {
  if (seconds == null) return UNKNOWN;
  if (seconds < 59.95) return `${seconds >= 9.95 ? seconds.toFixed(0) : trimmed(Math.max(0, seconds))} s`;
  let left = Math.floor(seconds + 0.05);
  const parts: string[] = [];
  for (const [unit, size] of UNITS) {
    if (left >= size) parts.push(`${Math.floor(left / size)} ${unit}`);
    left %= size;
  }
  return parts.slice(0, 2).join(" ");
}

/** The first eight characters of an id, which is what people compare. */
export function shortId(id: string): string {
  return id.length > 12 ? `${id.slice(0, 8)}…` : id;
}

function trimmed(amount: number): string {
  return amount.toFixed(1).replace(/\.0$/, "");
}
