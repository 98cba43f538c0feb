import type { ComponentChildren } from "preact";
import { Icon, type IconName } from "./icon";

export type Tone = "good" | "bad" | "warn" | "calm";

/** A state in one word, with its sign. */
export function Mark({ tone, icon, title, children }: { tone: Tone; icon: IconName; title?: string | undefined; children: ComponentChildren }) {
  return (
    <span class={`mark ${tone}`} title={title}>
      <Icon name={icon} />
      {children}
    </span>
  );
}
