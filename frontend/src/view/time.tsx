import { UNKNOWN } from "../format";
import { local, parsed, utc } from "../times";

/** A time: the reader's own, UTC on hover. */
export function Time({ at, now }: { at: string | null; now: string }) {
  const time = parsed(at);
  if (time === null) return <>{UNKNOWN}</>;
  return (
    <time dateTime={at ?? ""} title={utc(time)}>
      {local(time, parsed(now) ?? time)}
    </time>
  );
}

/** The same, or null where it is not known. */
export function timed(at: string | null, now: string) {
  return at ? <Time at={at} now={now} /> : null;
}
