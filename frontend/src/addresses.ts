/** The address when it is one that a link may lead to, else null: only http and https, never `javascript:`. */
export function webAddress(address: string | null | undefined): string | null {
  if (!address) return null;
  try {
    const { protocol } = new URL(address);
    return protocol === "http:" || protocol === "https:" ? address : null;
  } catch {
    return null;
  }
}
