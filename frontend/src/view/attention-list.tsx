import { useState } from "preact/hooks";
import type { Actions } from "../actions";
import { type Attention, type Concern, pressing, WORDS } from "../attention";
import { needing } from "../announce";
import { Icon, type IconName } from "./icon";
import { Mark, type Tone } from "./mark";

const SIGNS: Record<Concern, [Tone, IconName]> = {
  store: ["bad", "cross"],
  failed: ["bad", "cross"],
  stuck: ["bad", "halt"],
  silent: ["warn", "clock"],
  "dead-letters": ["warn", "letter"],
  note: ["calm", "note"],
};

const MOST = 12;

export function AttentionList({ items, act }: { items: Attention[]; act: Actions }) {
  const [whole, showWhole] = useState(false);
  const things = items.filter(pressing).length;
  return (
    <section id="attention" class={things ? "attention" : "attention fine"} aria-labelledby="attention-title">
      <h2 id="attention-title">
        <Icon name={things ? "warn" : "check"} />
        {things ? needing(things) : "Nothing needs attention"}
      </h2>
      {items.length > 0 && (
        <ul>
          {(whole ? items : items.slice(0, MOST)).map((item) => (
            <Item key={item.id} item={item} act={act} />
          ))}
        </ul>
      )}
      {items.length > MOST && (
        <p class="rest">
          <button type="button" onClick={() => showWhole(!whole)}>
            {whole ? `Show the first ${MOST}` : `Show all ${items.length}`}
          </button>
        </p>
      )}
    </section>
  );
}

function Item({ item, act }: { item: Attention; act: Actions }) {
  const [tone, icon] = SIGNS[item.concern];
  const { target } = item;
  return (
    <li>
      <Mark tone={tone} icon={icon}>
        {WORDS[item.concern]}
      </Mark>
      <p>
        {target ? (
          <button type="button" class="link" onClick={() => act.reveal(target)}>
            <bdi>{item.subject}</bdi>
          </button>
        ) : (
          item.subject && <strong>{item.subject}</strong>
        )}{" "}
        <span class={target ? "says" : "says whole"} title={item.says}>
          {item.says}
        </span>
      </p>
    </li>
  );
}
