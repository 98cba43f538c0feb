import type { Actions } from "../actions";
import type { PageState } from "../page-state";
import { AttentionList } from "./attention-list";
import { Consumers } from "./consumers";
import { DeadLetterQueues } from "./dead-letters";
import { Figures } from "./figures";
import { Header } from "./header";
import { Ledger } from "./ledger";
import { Navigation } from "./navigation";
import { Queries } from "./queries";
import { Queues } from "./queues";
import { Stale } from "./stale";

export interface Shared {
  state: PageState;
  act: Actions;
}

export function App({ state, act }: Shared) {
  const { shown } = state;
  return (
    <>
      <a class="skip" href="#main">
        To the content
      </a>
      <Header state={state} act={act} />
      <Navigation state={state} act={act} />
      <div role="status" class="unseen">
        {state.announcement}
      </div>
      <main id="main" tabIndex={-1} class={state.connection.state === "lost" ? "old" : undefined}>
        <Stale state={state} act={act} />
        {shown === null ? (
          <p class="empty waiting">Waiting for the first snapshot of the store.</p>
        ) : (
          <>
            <AttentionList items={state.attention} act={act} />
            <Figures snapshot={shown} />
            <Queues state={state} act={act} snapshot={shown} />
            <Consumers state={state} act={act} snapshot={shown} />
            <Queries state={state} act={act} snapshot={shown} />
            <Ledger state={state} act={act} snapshot={shown} />
            <DeadLetterQueues state={state} act={act} snapshot={shown} />
          </>
        )}
      </main>
      <footer>
        Penstock {shown?.version} · <kbd>/</kbd> filters, <kbd>Tab</kbd> and <kbd>Enter</kbd> open rows · times are local, UTC on
        hover
      </footer>
    </>
  );
}
