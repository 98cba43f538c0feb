import mark from "../mark.svg";
import type { PageState } from "../page-state";
import type { Scheme } from "../scheme";
import type { Shared } from "./app";
import { Icon, type IconName } from "./icon";
import { Mark } from "./mark";
import { Time } from "./time";

const SCHEMES: Record<Scheme, IconName> = { system: "screen", light: "sun", dark: "moon" };

export function Header({ state, act }: Shared) {
  const { shown, paused, scheme } = state;
  return (
    <header class="top">
      <h1>
        <img src={mark} alt="" width="20" height="20" />
        Penstock
      </h1>
      {shown && (
        <p class="store" title={shown.store.url}>
          <span class="kind">{shown.store.kind}</span> <code>{shown.store.url}</code>
        </p>
      )}
      <p class="connection">
        <ConnectionMark state={state} />
        {shown && (
          <span class="taken">
            <span class="unseen">Snapshot of </span>
            <Time at={shown.taken_at} now={new Date().toISOString()} />
          </span>
        )}
      </p>
      <div class="tools">
        <button type="button" onClick={() => act.pause(!paused)} disabled={!shown}>
          <Icon name={paused ? "play" : "halt"} />
          <span class="word">{paused ? "Resume" : "Pause"}</span>
        </button>
        <button type="button" onClick={act.turnScheme} title="Colours: the system's, light or dark" aria-label={`Colours: ${scheme}`}>
          <Icon name={SCHEMES[scheme]} />
          <span class="word">{scheme}</span>
        </button>
      </div>
    </header>
  );
}

function ConnectionMark({ state }: { state: PageState }) {
  const { connection, paused, shown } = state;
  if (connection.state === "lost") {
    return (
      <Mark tone="bad" icon="cross">
        reconnecting
      </Mark>
    );
  }
  if (connection.state === "connecting") {
    return (
      <Mark tone="calm" icon="clock">
        connecting
      </Mark>
    );
  }
  if (shown?.store.error) {
    return (
      <Mark tone="bad" icon="cross" title={shown.store.error}>
        store away
      </Mark>
    );
  }
  return paused ? (
    <Mark tone="warn" icon="halt">
      paused
    </Mark>
  ) : (
    <Mark tone="good" icon="dot">
      live
    </Mark>
  );
}
