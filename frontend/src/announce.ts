/** What a screen reader announces: changes of state, never numbers. */
import { type Attention, pressing, WORDS } from "./attention";

/** The sentences between two looks; the first look says how much is wrong, not what. */
export function changes(before: Attention[] | null, after: Attention[]): string[] {
  const now = after.filter(pressing);
  if (before === null) return now.length ? [needing(now.length)] : [];
  const was = before.filter(pressing);
  return [
    ...without(now, was).map((item) => `${WORDS[item.concern]}: ${item.subject}.`),
    ...without(was, now).map((item) => `No longer ${WORDS[item.concern].toLowerCase()}: ${item.subject}.`),
  ];
}

/** `1 thing needs attention`. */
export function needing(things: number): string {
  return things === 1 ? "1 thing needs attention" : `${things} things need attention`;
}

function without(items: Attention[], others: Attention[]): Attention[] {
  const ids = new Set(others.map((item) => item.id));
  return items.filter((item) => !ids.has(item.id));
}
