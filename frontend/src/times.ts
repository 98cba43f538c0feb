/** Times as people read them: theirs on the page, UTC on hover. */

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
const year = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });

/** `06:40:12` on the day of `now`, `22 Nov, 06:40` before it, `22 Nov 2025` in another year. */
export function local(at: Date, now: Date): string {
  if (at.toDateString() === now.toDateString()) return clock.format(at);
  return (at.getFullYear() === now.getFullYear() ? day : year).format(at);
}

export function utc(at: Date): string {
  return `${at.toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

/** The time that an ISO text stands for, or null where it is none. */
export function parsed(iso: string | null | undefined): Date | null {
  if (!iso) return null;
  const at = new Date(iso);
  return Number.isNaN(at.getTime()) ? null : at;
}

export function seconds(iso: string): number {
  return Date.parse(iso) / 1000;
}

/** `06:40:12`, of seconds since 1970. */
export function clockTime(at: number): string {
  return clock.format(at * 1000);
}

/** `06:40`, of seconds since 1970. */
export function clockMinute(at: number): string {
  return clockTime(at).slice(0, 5);
}
