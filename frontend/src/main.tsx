/** The page: one state, painted whenever it changes. */
import "./style/index.css";
import { render } from "preact";
import { needing } from "./announce";
import type { Actions } from "./actions";
import { pressing } from "./attention";
import { keepingFocus } from "./focus";
import { expanderId } from "./keys";
import { Live } from "./live";
import * as to from "./page-state";
import { chooseScheme, chosenScheme, nextScheme, onSystemScheme } from "./scheme";
import { slashFocuses } from "./shortcuts";
import { App } from "./view/app";

const page = document.getElementById("page")!;
let state = to.firstState(chosenScheme());
let due = false;

function become(next: to.PageState): void {
  state = next;
  if (due) return;
  due = true;
  queueMicrotask(paint);
}

function paint(): void {
  due = false;
  keepingFocus(() => render(<App state={state} act={act} />, page));
  const things = state.attention.filter(pressing).length;
  document.title = things ? `${needing(things)} – Penstock` : "Penstock";
}

/** An address with `#queries` leads there as soon as there is something to lead to. */
function goToHash(): void {
  paint();
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

const live = new Live({
  snapshot(snapshot) {
    const first = state.shown === null;
    become(to.heard(state, snapshot, new Date()));
    if (first && location.hash) goToHash();
  },
  connection: (connection) => become(to.connected(state, connection)),
});

const act: Actions = {
  toggle: (target) => become(to.toggled(state, target)),
  reveal(target) {
    become(to.revealed(state, target));
    paint();
    const expander = document.getElementById(expanderId(target));
    expander?.scrollIntoView({ block: "center" });
    expander?.focus({ preventScroll: true });
  },
  filter: (filter) => become({ ...state, filter }),
  pause: (hold) => become(to.paused(state, hold)),
  showWhole: (section, whole) => become(to.shownWhole(state, section, whole)),
  order: (section, column) => become(to.reordered(state, section, column)),
  turnScheme() {
    const scheme = nextScheme(state.scheme);
    chooseScheme(scheme);
    become({ ...state, scheme });
  },
  retry: () => live.connect(),
};

onSystemScheme(() => become({ ...state }));
slashFocuses("filter");
addEventListener("online", () => state.connection.state === "lost" && live.connect());
paint();
live.connect();
