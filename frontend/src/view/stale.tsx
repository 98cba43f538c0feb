import type { Shared } from "./app";
import { local } from "../times";

/** Says that the page is not live, since when, and why. */
export function Stale({ state, act }: Shared) {
  const { connection, heardAt } = state;
  if (connection.state !== "lost") return null;
  const now = new Date();
  return (
    <div class="stale">
      <p>
        <strong>{heardAt ? `Not live since ${local(heardAt, now)}.` : "Not live."}</strong> {heardAt && "The data below is from then. "}
        {connection.reason}. {connection.retryAt && `Next try at ${local(connection.retryAt, now)}.`}
      </p>
      <button type="button" onClick={act.retry}>
        Try now
      </button>
    </div>
  );
}
