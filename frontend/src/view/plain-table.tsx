import type { ComponentChildren } from "preact";

interface Props {
  caption: string;
  /** Titles of the columns; those that begin with `#` hold numbers. */
  titles: string[];
  rows: { key: string; cells: ComponentChildren[] }[];
}

/** A small table inside an opened row; the first cell of a row is its header. */
export function PlainTable({ caption, titles, rows }: Props) {
  const kind = (i: number) => (titles[i]?.startsWith("#") ? "number" : undefined);
  return (
    <div class="plain" tabIndex={0} role="region" aria-label={caption}>
      <table>
        <caption>{caption}</caption>
        <thead>
          <tr>
            {titles.map((title, i) => (
              <th key={title} scope="col" class={kind(i)}>
                {title.replace(/^#/, "")}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map(({ key, cells: [head, ...cells] }) => (
            <tr key={key}>
              <th scope="row" class={kind(0)}>
                {head}
              </th>
              {cells.map((cell, i) => (
                <td key={titles[i + 1]} class={kind(i + 1)}>
                  {cell}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
