import { firstLine } from "../attention";
import { count } from "../format";
import { passes } from "../filter";
import type { DeadLetters, Snapshot } from "../snapshot";
import type { Shared } from "./app";
import { Nothing } from "./nothing";
import { PlainTable } from "./plain-table";
import { Section } from "./section";
import { type Column, numbers, Table } from "./table";
import { Time } from "./time";

const MOST = 20;

export function DeadLetterQueues({ state, act, snapshot }: Shared & { snapshot: Snapshot }) {
  const all = snapshot.dead_letters;
  const queues = all.filter((letters) => passes(state.filter, letters.queue));
  return (
    <Section name="dead-letters" title="Dead letters" total={all.length} passing={queues.length}>
      {queues.length ? (
        <Table
          section="dead-letters"
          caption="Queues of rows that were refused, and why"
          head={{ title: "Queue", by: (letters) => letters.queue, cell: (letters) => <bdi>{letters.queue}</bdi> }}
          columns={columns(snapshot.taken_at)}
          rows={queues}
          keyOf={(letters) => letters.queue}
          tone={(letters) => (letters.rows ? "warn" : undefined)}
          detail={(letters) => <Newest letters={letters} now={snapshot.taken_at} />}
          most={MOST}
          state={state}
          act={act}
        />
      ) : (
        <Nothing filter={state.filter} total={all.length}>
          <p>
            There is no queue for refused rows. Create one with <code>store.create_queue("refused", penstock.changes.DEAD_LETTERS)</code>.
          </p>
        </Nothing>
      )}
    </Section>
  );
}

function columns(now: string): Column<DeadLetters>[] {
  return [
    numbers("rows", "Rows", (letters) => letters.rows, count),
    {
      id: "appended",
      title: "Last append",
      numeric: true,
      by: (letters) => letters.last_append_at,
      cell: (letters) => <Time at={letters.last_append_at} now={now} />,
    },
    {
      id: "reason",
      title: "Newest reason",
      leaves: "second",
      cell: (letters) => <span class="reason">{firstLine(letters.newest[0]?.reason ?? "–")}</span>,
    },
  ];
}

function Newest({ letters, now }: { letters: DeadLetters; now: string }) {
  return (
    <div class="detail">
      <PlainTable
        caption={`The newest of ${letters.queue}`}
        titles={["Refused", "Reason", "Value"]}
        rows={letters.newest.map((letter, i) => ({
          key: `${letter.at} ${i}`,
          cells: [<Time at={letter.at} now={now} />, letter.reason ?? "–", <code class="value">{letter.value ?? "–"}</code>],
        }))}
      />
    </div>
  );
}
