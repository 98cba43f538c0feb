/** Small signs that go with a word: what they say is never said by colour alone. */
const PATHS = {
  dot: "M6 3a3 3 0 1 1 0 6a3 3 0 0 1 0-6z",
  square: "M3.5 3.5h5v5h-5z",
  cross: "M3 3l6 6M9 3l-6 6",
  clock: "M6 1.8a4.2 4.2 0 1 1 0 8.4a4.2 4.2 0 0 1 0-8.4zM6 3.8V6l1.6 1.2",
  halt: "M4.2 2.8v6.4M7.8 2.8v6.4",
  check: "M2.5 6.4L5 8.8l4.5-5.4",
  down: "M6 2.5v7M3 6.8l3 2.9l3-2.9",
  up: "M6 9.5v-7M3 5.2l3-2.9l3 2.9",
  warn: "M6 1.8L10.8 10H1.2zM6 4.8v2.4M6 8.4v.3",
  letter: "M1.8 3h8.4v6H1.8zM1.8 3.3L6 6.6l4.2-3.3",
  note: "M6 1.8a4.2 4.2 0 1 1 0 8.4a4.2 4.2 0 0 1 0-8.4zM6 5.4v2.9M6 3.6v.3",
  chevron: "M4.2 2.6L7.8 6L4.2 9.4",
  away: "M4.5 2.8H2.5v6.7h6.7V7.5M6.4 2.5h3.1v3.1M9.4 2.6L5.6 6.4",
  play: "M4 2.6v6.8L9.4 6z",
  sun: "M6 4a2 2 0 1 1 0 4a2 2 0 0 1 0-4zM6 .8v1.4M6 9.8v1.4M.8 6h1.4M9.8 6h1.4M2.3 2.3l1 1M8.7 8.7l1 1M2.3 9.7l1-1M8.7 3.3l1-1",
  moon: "M9.8 7.4A4.3 4.3 0 1 1 4.6 2.2A3.5 3.5 0 0 0 9.8 7.4z",
  screen: "M1.5 2.5h9v6h-9zM4 10.5h4",
} as const;

export type IconName = keyof typeof PATHS;

const FILLED: ReadonlySet<IconName> = new Set(["dot", "play"]);

export function Icon({ name }: { name: IconName }) {
  return (
    <svg class={FILLED.has(name) ? "icon filled" : "icon"} viewBox="0 0 12 12" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}
