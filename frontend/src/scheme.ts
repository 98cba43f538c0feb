/** Light or dark: the system's, until somebody chooses; the choice stays in this browser. */

export type Scheme = "system" | "light" | "dark";

const KEY = "penstock.scheme";
const ORDER: Scheme[] = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");

export function chosenScheme(): Scheme {
  const set = document.documentElement.dataset.scheme;
  return set === "light" || set === "dark" ? set : "system";
}

/** The next of system, light and dark, beginning with the one that looks different from now. */
export function nextScheme(now: Scheme): Scheme {
  const order = dark.matches ? ORDER : (["system", "dark", "light"] as Scheme[]);
  return order[(order.indexOf(now) + 1) % order.length] ?? "system";
}

export function chooseScheme(scheme: Scheme): void {
  if (scheme === "system") delete document.documentElement.dataset.scheme;
  else document.documentElement.dataset.scheme = scheme;
  try {
    if (scheme === "system") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, scheme);
  } catch {
    // Storage is switched off: the choice holds until the page is left.
  }
}

export function onSystemScheme(changed: () => void): void {
  dark.addEventListener("change", changed);
}
