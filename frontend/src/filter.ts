/** Whether every word of the filter stands somewhere in the texts; an empty filter passes all. */
export function passes(filter: string, ...texts: (string | null | undefined)[]): boolean {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return true;
  const text = texts.filter(Boolean).join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}
