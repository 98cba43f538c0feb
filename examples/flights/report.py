"""The story on the terminal, and as one HTML page."""

from __future__ import annotations

import base64
import platform
from collections.abc import Iterable
from html import escape
from importlib.metadata import version
from pathlib import Path

from rich import markup
from rich.console import Console
from rich.table import Table as RichTable

from examples.flights.story import DemoResult, Step, Table, summary_line, verdict

_MIME_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
_STYLE = """
:root {
  color-scheme: light dark; --text: #1c2430; --soft: #5b6675; --line: #d9dee5; --back: #fff; --good: #12703a;
  --bad: #b3261e
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e6e9ee; --soft: #a4afbd; --line: #3a434f; --back: #14181d; --good: #6fce93; --bad: #ff8a80
  }
}
body {
  font: 16px/1.55 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 56rem;
  margin: 2rem auto; padding: 0 1rem
}
h1 { font-size: 1.9rem; margin-bottom: .2rem }
h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1.5rem }
h2 span { color: var(--soft); font-weight: 400 } .soft { color: var(--soft) }
.verdict { font-weight: 700; color: var(--good) } .verdict.bad { color: var(--bad) }
aside { border-left: 4px solid var(--line); padding: .1rem 1rem; color: var(--soft) }
aside strong { color: var(--text) }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0 }
caption { text-align: left; color: var(--soft); padding-bottom: .3rem }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right }
.text { text-align: left }
figure { margin: 1.5rem 0 }
img { max-width: 100%; background: #fff; border-radius: 4px }
figcaption { color: var(--soft); font-size: .9rem }
"""


def print_story(steps: list[Step], result: DemoResult, console: Console) -> None:
    """Print the steps, the summary and the verdict."""
    for number, step in enumerate(steps, 1):
        console.print()
        console.rule(f"{number} of {len(steps)}: {step.title}", align="left")
        console.print(step.shows, highlight=False)
        if step.text:
            console.print()
            console.print(step.text, highlight=False, markup=False, soft_wrap=True)
        for table in step.tables:
            console.print(_rich_table(table))
        plain = markup.escape(step.in_plain_pyspark)
        console.print(f"[bold]In plain PySpark:[/] {plain}", highlight=False)
    console.print()
    console.rule(align="left")
    console.print(summary_line(result), highlight=False)
    console.print(verdict(result), style="bold green" if result.holds else "bold red")


def _rich_table(table: Table) -> RichTable:
    rich = RichTable(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        rich.add_column(column, justify="left" if index < table.text_columns else "right")
    for row in table.rows:
        rich.add_row(*row)
    return rich


def write_report(steps: list[Step], result: DemoResult, file: Path) -> None:
    """Write the story as one HTML page that refers to no other file."""
    bad = "" if result.holds else " bad"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Penstock: a year of flights</title><style>{_STYLE}</style></head><body><main>",
        "<h1>A year of flights, every row exactly once</h1>",
        f"<p class='soft'>{escape(_versions())}</p>",
        f"<p class='verdict{bad}'>{escape(verdict(result))}</p>",
        f"<p>{escape(summary_line(result))}</p>",
        *(_section(number, len(steps), step) for number, step in enumerate(steps, 1)),
        "</main></body></html>\n",
    ]
    file.write_text("\n".join(parts), encoding="utf-8")


def _versions() -> str:
    names = ("penstock-spark", "pyspark", "pyarrow")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{versions}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"


def _section(number: int, count: int, step: Step) -> str:
    parts: Iterable[str] = (
        f"<section><h2><span>{number} of {count}</span> {escape(step.title)}</h2>",
        f"<p>{escape(step.shows)}</p>",
        *map(_table, step.tables),
        *(_figure(picture, caption) for caption, picture in (step.pictures or {}).items()),
        f"<aside><p><strong>In plain PySpark.</strong> {escape(step.in_plain_pyspark)}</p></aside></section>",
    )
    return "\n".join(parts)


def _table(table: Table) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if index < table.text_columns else ''}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    head = f"<caption>{escape(table.title)}</caption><thead><tr>{row(table.columns, 'th')}</tr></thead>"
    return f"<div class='wide'><table>{head}<tbody>{body}</tbody></table></div>"


def _figure(picture: Path, caption: str) -> str:
    data = base64.b64encode(picture.read_bytes()).decode()
    source = f"data:{_MIME_TYPES[picture.suffix]};base64,{data}"
    text = escape(caption)
    return f"<figure><img src='{source}' alt='{text}'><figcaption>{text}</figcaption></figure>"
