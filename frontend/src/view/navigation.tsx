import { count } from "../format";
import type { SectionName } from "../keys";
import type { Snapshot } from "../snapshot";
import type { Shared } from "./app";

const SECTIONS: [SectionName, string, (snapshot: Snapshot) => number][] = [
  ["queues", "Queues", (snapshot) => snapshot.queues.length],
  ["consumers", "Consumers", (snapshot) => snapshot.consumers.length],
  ["queries", "Queries", (snapshot) => snapshot.queries.length],
  ["ledger", "Ledger", (snapshot) => snapshot.ledger.length],
  ["dead-letters", "Dead letters", (snapshot) => snapshot.dead_letters.length],
];

export function Navigation({ state, act }: Shared) {
  return (
    <div class="bar">
      <nav aria-label="Sections">
        <ul>
          {SECTIONS.map(([section, title, size]) => (
            <li key={section}>
              <a href={`#${section}`}>
                {title} {state.shown && <span class="size">{count(size(state.shown))}</span>}
              </a>
            </li>
          ))}
        </ul>
      </nav>
      <form role="search" onSubmit={(event) => event.preventDefault()}>
        <label class="unseen" for="filter">
          Filter all sections by name
        </label>
        <input
          id="filter"
          type="search"
          placeholder="Filter   /"
          autocomplete="off"
          spellcheck={false}
          aria-keyshortcuts="/"
          value={state.filter}
          onInput={(event) => act.filter(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key !== "Escape") return;
            if (state.filter) act.filter("");
            else event.currentTarget.blur();
          }}
        />
      </form>
    </div>
  );
}
