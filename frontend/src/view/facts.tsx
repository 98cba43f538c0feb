import type { ComponentChildren } from "preact";

/** Names and what they stand for, such as `Checkpoint` and its path; what is null is left out. */
export function Facts({ of }: { of: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {of
        .filter(([, fact]) => fact != null)
        .map(([name, fact]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{fact}</dd>
          </div>
        ))}
    </dl>
  );
}

/** A text that somebody may want to copy: an id, a path. */
export function code(text: string | null) {
  if (!text) return null;
  return (
    <code>
      <bdi>{text}</bdi>
    </code>
  );
}
