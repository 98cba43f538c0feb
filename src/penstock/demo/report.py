"""The story as one HTML page that needs no other file."""

from __future__ import annotations

import base64
import platform
from collections.abc import Iterable
from html import escape
from importlib.metadata import version
from pathlib import Path

from penstock.demo.result import DemoResult
from penstock.demo.story import Step, Table, summing_up, verdict

_KINDS = {".png": "image/png", ".svg": "image/svg+xml"}
_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #5b6675; --line: #d9dee5; --back: #fff; --good: #12703a; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ee; --soft: #a4afbd; --line: #3a434f; --back: #14181d; --good: #6fce93; --bad: #ff8a80 }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.9rem; margin-bottom: .2rem } h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1.5rem }
h2 span { color: var(--soft); font-weight: 400 } .soft { color: var(--soft) }
.verdict { font-weight: 700; color: var(--good) } .verdict.bad { color: var(--bad) }
aside { border-left: 4px solid var(--line); padding: .1rem 1rem; color: var(--soft) } aside strong { color: var(--text) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0 }
caption { text-align: left; color: var(--soft); padding-bottom: .3rem }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right } .text { text-align: left }
figure { margin: 1.5rem 0 } img { max-width: 100%; background: #fff; border-radius: 4px } figcaption { color: var(--soft); font-size: .9rem }
"""


def write_report(steps: list[Step], result: DemoResult, file: Path) -> None:
    """Write the page."""
    bad = "" if result.holds else " bad"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Penstock: a year of flights</title><style>{_STYLE}</style></head><body><main>",
        "<h1>A year of flights, every row exactly once</h1>",
        f"<p class='soft'>{escape(_about())}</p>",
        f"<p class='verdict{bad}'>{escape(verdict(result))}</p>",
        f"<p>{escape(summing_up(result))}</p>",
        *(_section(number, len(steps), step) for number, step in enumerate(steps, 1)),
        "</main></body></html>\n",
    ]
    file.write_text("\n".join(parts), encoding="utf-8")


def _about() -> str:
    names = ("penstock", "pyspark", "pyarrow")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{versions}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"


def _section(number: int, of: int, step: Step) -> str:
    parts: Iterable[str] = (
        f"<section><h2><span>{number} of {of}</span> {escape(step.title)}</h2>",
        f"<p>{escape(step.shows)}</p>",
        *map(_table, step.tables),
        *(_figure(picture, about) for about, picture in (step.pictures or {}).items()),
        f"<aside><p><strong>In plain PySpark.</strong> {escape(step.plainly)}</p></aside></section>",
    )
    return "\n".join(parts)


def _table(table: Table) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if place < table.texts else ''}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    head = f"<caption>{escape(table.title)}</caption><thead><tr>{row(table.columns, 'th')}</tr></thead>"
    return f"<div class='wide'><table>{head}<tbody>{body}</tbody></table></div>"


def _figure(picture: Path, about: str) -> str:
    data = base64.b64encode(picture.read_bytes()).decode()
    source = f"data:{_KINDS[picture.suffix]};base64,{data}"
    return f"<figure><img src='{source}' alt='{escape(about, quote=True)}'><figcaption>{escape(about)}</figcaption></figure>"
