/** The course of some numbers over time, drawn by uPlot; what it shows is also told in words above it. */
import uPlot from "uplot";
import { useEffect, useRef, useState } from "preact/hooks";
import { short } from "../format";
import type { Values } from "../series";
import { clockTime, clockMinute } from "../times";

export interface ChartLine {
  label: string;
  values: Values;
}

interface Props {
  title: string;
  /** Seconds since 1970, oldest first; as many as each line has values. */
  at: number[];
  lines: ChartLine[];
  format: (value: number | null | undefined) => string;
  /** Charts of one group show one cursor. */
  group: string;
}

const HEIGHT = 132;
/** The first line is drawn whole and filled, the second dashed: colour is not what tells them apart. */
const STROKES = ["--line-1", "--line-2"];
const DASHES = [[], [5, 4]];

export function Chart({ title, at, lines, format, group }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [pointed, point] = useState<number | null>(null);
  const index = pointed != null && pointed < at.length ? pointed : at.length - 1;

  useEffect(() => {
    const within = place.current!;
    const drawn = new uPlot(options(within.clientWidth, lines, group, point), [at, ...lines.map((line) => line.values)], within);
    plot.current = drawn;
    const widened = new ResizeObserver(() => drawn.setSize({ width: within.clientWidth, height: HEIGHT }));
    widened.observe(within);
    return () => {
      widened.disconnect();
      drawn.destroy();
    };
  }, []);

  useEffect(() => plot.current?.setData([at, ...lines.map((line) => line.values)]), [at, lines]);

  return (
    <figure class="chart">
      <figcaption>
        <strong>{title}</strong>
        {lines.map((line, i) => (
          <span key={line.label} class={`key key-${i + 1}`}>
            {line.label} <b>{format(line.values[index])}</b>
          </span>
        ))}
        <span class="when">{pointed != null && at[index] !== undefined ? `at ${clockTime(at[index])}` : ""}</span>
      </figcaption>
      <div class="plot" ref={place} aria-hidden="true" />
    </figure>
  );
}

function options(width: number, lines: ChartLine[], group: string, point: (index: number | null) => void): uPlot.Options {
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    padding: [8, 8, 0, 0],
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 }, sync: { key: group } },
    scales: { y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] } },
    axes: [
      { ...axis(), space: 76, size: 22, values: (_, splits, __, ___, step) => splits.map(step < 60 ? clockTime : clockMinute) },
      { ...axis(), space: 30, size: 44, values: (_, splits) => splits.map(short) },
    ],
    series: [{}, ...lines.map((line, i) => series(line, i))],
    hooks: { setCursor: [(drawn) => point(drawn.cursor.idx ?? null)] },
  };
}

function axis(): uPlot.Axis {
  return {
    stroke: () => colour("--axis"),
    font: "11px system-ui, sans-serif",
    gap: 4,
    grid: { stroke: () => colour("--grid"), width: 1 },
    ticks: { show: false },
  };
}

function series(line: ChartLine, i: number): uPlot.Series {
  return {
    label: line.label,
    width: 1.5,
    stroke: () => colour(STROKES[i] ?? STROKES[0]!),
    dash: DASHES[i] ?? [],
    points: { show: (drawn) => drawn.data[0].length < 3 },
    ...(i === 0 && { fill: () => colour("--line-1-area") }),
  };
}

/** The value of a registered custom property of the page, in the scheme of the moment. */
function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name);
}
