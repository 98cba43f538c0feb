import type { ComponentChildren } from "preact";
import { count } from "../format";
import type { SectionName } from "../keys";

interface Props {
  name: SectionName;
  title: string;
  /** How many there are, and how many of them pass the filter. */
  total: number;
  passing: number;
  children: ComponentChildren;
}

export function Section({ name, title, total, passing, children }: Props) {
  return (
    <section id={name} aria-labelledby={`${name}-title`}>
      <h2 id={`${name}-title`}>
        {title} <span class="size">{passing === total ? count(total) : `${count(passing)} of ${count(total)}`}</span>
      </h2>
      {children}
    </section>
  );
}
