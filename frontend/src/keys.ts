/** What tells the rows of a section apart, and the ids of their elements. */
import type { Consumer, LedgerRow, Query, Queue } from "./snapshot";

export type SectionName = "queues" | "consumers" | "queries" | "ledger" | "dead-letters";

export interface Target {
  section: SectionName;
  key: string;
}

export const queueKey = (queue: Queue): string => queue.name;
export const consumerKey = (consumer: Consumer): string => JSON.stringify([consumer.consumer, consumer.queue]);
export const queryKey = (query: Query): string => query.id || query.checkpoint || query.name || "";
export const ledgerKey = (row: LedgerRow): string => JSON.stringify([row.sink, row.app_id, row.batch]);

export const targetKey = (target: Target): string => `${target.section}/${target.key}`;
export const expanderId = (target: Target): string => `open-${target.section}-${encodeURIComponent(target.key)}`;
export const detailId = (target: Target): string => `about-${target.section}-${encodeURIComponent(target.key)}`;
