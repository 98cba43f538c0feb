/** How long to wait before try number `attempt` (1, 2, …), in milliseconds: doubling to ten seconds, a fifth of it by chance. */
export function backoff(attempt: number, chance: () => number = Math.random): number {
  const whole = Math.min(500 * 2 ** (attempt - 1), 10_000);
  return whole * (0.8 + 0.2 * chance());
}
