import type { ComponentChildren } from "preact";
import { UNKNOWN } from "../format";

/** Names and what they stand for, such as `Checkpoint` and its path; what is not known is left out. */
export function Facts({ of }: { of: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {of
        .filter(([, fact]) => fact != null && fact !== "" && fact !== UNKNOWN)
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
export function Code({ children }: { children: string | null }) {
  return children ? (
    <code>
      <bdi>{children}</bdi>
    </code>
  ) : null;
}
