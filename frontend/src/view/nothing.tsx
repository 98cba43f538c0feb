import type { ComponentChildren } from "preact";

/** In place of a table without rows: that the filter hides them all, or what to do for there to be some. */
export function Nothing({ filter, total, children }: { filter: string; total: number; children: ComponentChildren }) {
  return <div class="empty">{total ? <p>Nothing here matches “{filter}”.</p> : children}</div>;
}
