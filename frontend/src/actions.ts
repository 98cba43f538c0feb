/** What people can do on the page. */
import type { SectionName, Target } from "./keys";

export interface Actions {
  toggle(target: Target): void;
  /** Open the target and take the reader to it. */
  reveal(target: Target): void;
  filter(text: string): void;
  pause(hold: boolean): void;
  showWhole(section: SectionName, whole: boolean): void;
  order(section: SectionName, column: string): void;
  turnScheme(): void;
  retry(): void;
}
