import { known, thinned, type Values } from "../series";

const WIDTH = 72;
const HEIGHT = 18;

/** The course of a number, from zero up; the number itself stands beside it. */
export function Sparkline({ values, most = 48 }: { values: Values; most?: number }) {
  const points = thinned(values, most);
  if (points.length < 2 || !known(points)) return <span class="sparkline" />;
  const top = Math.max(...points.map((value) => value ?? 0)) || 1;
  const line = path(points, top);
  return (
    <svg class="sparkline" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true" focusable="false">
      <path class="area" d={`${line}V${HEIGHT}H${x(firstKnown(points), points.length)}Z`} />
      <path class="line" d={line} />
    </svg>
  );
}

function path(points: Values, top: number): string {
  return points
    .map((value, i) => (value == null ? "" : `${x(i, points.length)},${(HEIGHT - 1.5 - (value / top) * (HEIGHT - 3)).toFixed(1)}`))
    .filter(Boolean)
    .map((point, i) => (i ? `L${point}` : `M${point}`))
    .join("");
}

function firstKnown(points: Values): number {
  return points.findIndex((value) => value != null);
}

function x(i: number, length: number): string {
  return ((i / (length - 1)) * WIDTH).toFixed(1);
}
