/** A table of a section: rows that open, columns that sort, and no more rows than a page bears until they are asked for. */
import { type ComponentChildren, Fragment } from "preact";
import { count } from "../format";
import { detailId, expanderId, type SectionName, targetKey } from "../keys";
import { type Order, ordered, type Sortable } from "../order";
import type { Shared } from "./app";
import { Icon } from "./icon";

export interface Column<Row> {
  id: string;
  title: string;
  hint?: string;
  numeric?: boolean;
  /** Left out where the page is narrow (`first`: already on a small laptop); what opens below the row has it then. */
  leaves?: "first" | "second";
  by?: (row: Row) => Sortable;
  cell: (row: Row) => ComponentChildren;
}

/** A column of one number each, by which it sorts. */
export function numbers<Row>(
  id: string,
  title: string,
  number: (row: Row) => number | null | undefined,
  format: (value: number | null | undefined) => string,
  more: Pick<Column<Row>, "hint" | "leaves"> = {},
): Column<Row> {
  return { id, title, numeric: true, by: number, cell: (row) => format(number(row)), ...more };
}

interface Props<Row> extends Shared {
  section: SectionName;
  caption: string;
  columns: Column<Row>[];
  rows: Row[];
  keyOf: (row: Row) => string;
  /** What stands in the first column, the row's header. */
  head: { title: string; by: (row: Row) => Sortable; cell: (row: Row) => ComponentChildren };
  tone?: (row: Row) => "bad" | "warn" | undefined;
  /** A line of its own below the row, such as an error. */
  below?: (row: Row) => ComponentChildren;
  /** What opens below the row. */
  detail?: (row: Row) => ComponentChildren;
  most: number;
}

export function Table<Row>(props: Props<Row>) {
  const { section, caption, columns, rows, head, most, state, act } = props;
  const order = state.orders.get(section) ?? null;
  const whole = state.whole.has(section);
  const sorted = inOrder(rows, [{ id: "name", by: head.by }, ...columns], order);
  return (
    <>
      <div class="scroll">
        <table class={section}>
          <caption class="unseen">{caption}</caption>
          <thead>
            <tr>
              <Heading id="name" title={head.title} sorts order={order} onPress={() => act.order(section, "name")} />
              {columns.map((column) => (
                <Heading
                  key={column.id}
                  id={column.id}
                  title={column.title}
                  hint={column.hint}
                  kind={classes(column)}
                  sorts={column.by !== undefined}
                  order={order}
                  onPress={() => act.order(section, column.id)}
                />
              ))}
            </tr>
          </thead>
          <tbody>
            {(whole ? sorted : sorted.slice(0, most)).map((row) => (
              <Line key={props.keyOf(row)} row={row} {...props} />
            ))}
          </tbody>
        </table>
      </div>
      {rows.length > most && (
        <p class="rest">
          {whole ? `All ${count(rows.length)} are shown. ` : `${count(most)} of ${count(rows.length)} are shown. `}
          <button type="button" onClick={() => act.showWhole(section, !whole)}>
            {whole ? `Show the first ${count(most)}` : `Show all ${count(rows.length)}`}
          </button>
        </p>
      )}
    </>
  );
}

function Line<Row>(props: Props<Row> & { row: Row }) {
  const { row, section, columns, head, state, act } = props;
  const target = { section, key: props.keyOf(row) };
  const open = state.open.has(targetKey(target));
  const below = props.below?.(row);
  const width = columns.length + 1;
  return (
    <Fragment>
      <tr class={[props.tone?.(row), below && "leads", open && "open"].filter(Boolean).join(" ") || undefined}>
        <th scope="row">
          {props.detail ? (
            <button
              type="button"
              class="expander"
              id={expanderId(target)}
              aria-expanded={open}
              aria-controls={open ? detailId(target) : undefined}
              onClick={() => act.toggle(target)}
            >
              <Icon name="chevron" />
              {head.cell(row)}
            </button>
          ) : (
            head.cell(row)
          )}
        </th>
        {columns.map((column) => (
          <td key={column.id} class={classes(column)}>
            {column.cell(row)}
          </td>
        ))}
      </tr>
      {below && (
        <tr key="below" class={`below ${props.tone?.(row) ?? ""}`}>
          <td colSpan={width}>{below}</td>
        </tr>
      )}
      {open && props.detail && (
        <tr key="about" class="about" id={detailId(target)}>
          <td colSpan={width}>{props.detail(row)}</td>
        </tr>
      )}
    </Fragment>
  );
}

interface HeadingProps {
  id: string;
  title: string;
  hint?: string | undefined;
  kind?: string | undefined;
  sorts: boolean;
  order: Order | null;
  onPress: () => void;
}

function Heading({ id, title, hint, kind, sorts, order, onPress }: HeadingProps) {
  if (!sorts) {
    return (
      <th scope="col" class={kind} title={hint}>
        {title}
      </th>
    );
  }
  const here = order?.column === id ? order : null;
  return (
    <th scope="col" class={kind} title={hint} aria-sort={here ? (here.descending ? "descending" : "ascending") : undefined}>
      <button type="button" class="sorter" onClick={onPress}>
        {title}
        {here && <Icon name={here.descending ? "down" : "up"} />}
      </button>
    </th>
  );
}

function classes<Row>(column: Column<Row>): string | undefined {
  return [column.numeric && "number", column.leaves && `leaves-${column.leaves}`].filter(Boolean).join(" ") || undefined;
}

function inOrder<Row>(rows: Row[], columns: Pick<Column<Row>, "id" | "by">[], order: Order | null): Row[] {
  const by = columns.find((column) => column.id === order?.column)?.by;
  return order && by ? ordered(rows, by, order.descending) : rows;
}
