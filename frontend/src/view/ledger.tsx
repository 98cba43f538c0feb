import { count, shortId } from "../format";
import { passes } from "../filter";
import { ledgerKey } from "../keys";
import type { LedgerRow, Snapshot } from "../snapshot";
import type { Shared } from "./app";
import { Nothing } from "./nothing";
import { Section } from "./section";
import { type Column, numbers, Table } from "./table";
import { Time } from "./time";

const MOST = 10;

export function Ledger({ state, act, snapshot }: Shared & { snapshot: Snapshot }) {
  const rows = snapshot.ledger.filter((row) => passes(state.filter, row.sink, row.query, row.app_id));
  return (
    <Section name="ledger" title="Ledger" total={snapshot.ledger.length} passing={rows.length}>
      {rows.length ? (
        <Table
          section="ledger"
          caption="The newest commits, by which a repeated batch is recognized and skipped"
          head={{ title: "Sink", by: (row) => row.sink, cell: (row) => <bdi>{row.sink}</bdi> }}
          columns={columns(snapshot.taken_at)}
          rows={rows}
          keyOf={ledgerKey}
          most={MOST}
          state={state}
          act={act}
        />
      ) : (
        <Nothing filter={state.filter} total={snapshot.ledger.length}>
          <p>
            Nothing has been committed exactly once yet. A pipeline with <code>guarantee="exactly_once"</code> leaves a row here for
            each batch or epoch.
          </p>
        </Nothing>
      )}
    </Section>
  );
}

function columns(now: string): Column<LedgerRow>[] {
  return [
    { id: "query", title: "Query", by: (row) => row.query, cell: (row) => <bdi>{row.query ?? "–"}</bdi> },
    numbers("batch", "Batch, epoch", (row) => row.batch, count),
    numbers("rows", "Rows", (row) => row.rows, count),
    {
      id: "committed",
      title: "Committed",
      numeric: true,
      by: (row) => row.committed_at,
      cell: (row) => <Time at={row.committed_at} now={now} />,
    },
    {
      id: "app",
      title: "App id",
      leaves: "second",
      by: (row) => row.app_id,
      cell: (row) => <code title={row.app_id}>{shortId(row.app_id)}</code>,
    },
  ];
}
