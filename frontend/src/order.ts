/** The order of a table's rows: the server's own until somebody asks for another. */
export interface Order {
  column: string;
  descending: boolean;
}

export type Sortable = number | string | null | undefined;

/** The order after a press on a column's header: greatest first, then least first, then the server's own again. */
export function pressed(order: Order | null, column: string): Order | null {
  if (order?.column !== column) return { column, descending: true };
  return order.descending ? { column, descending: false } : null;
}

/** The rows by `value`; equal ones keep their places, and those without a value come last either way. */
export function ordered<Row>(rows: Row[], value: (row: Row) => Sortable, descending: boolean): Row[] {
  return rows.toSorted((left, right) => compared(value(left), value(right), descending));
}

function compared(left: Sortable, right: Sortable, descending: boolean): number {
  if (left == null || right == null) return Number(left == null) - Number(right == null);
  const sign = descending ? -1 : 1;
  if (typeof left === "number" && typeof right === "number") return sign * (left - right);
  return sign * String(left).localeCompare(String(right), "en", { numeric: true });
}
