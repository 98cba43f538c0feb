/** Do `work`, which may move elements, and leave the focus where it was: an element that is moved loses it. */
export function keepingFocus(work: () => void): void {
  const focused = document.activeElement;
  work();
  if (focused instanceof HTMLElement && focused !== document.activeElement && focused.isConnected) {
    focused.focus({ preventScroll: true });
  }
}
