"""What people see and do on the monitor page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from penstock.store.records import queries
from penstock.store.records.queries import QueryError, QueryProgress, QueryRun
from tests.ui.browser.conftest import Open
from tests.ui.browser.monitor import Monitor

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from penstock.queue.store import Store

pytestmark = pytest.mark.timeout(120)

SCHEMA = pa.schema([("id", pa.int64())])
ODD = """<script>alert("x")</script>'&amp; \u202egnp"""


def rows(count: int) -> list[dict[str, int]]:
    return [{"id": i} for i in range(count)]


@pytest.fixture(scope="module", autouse=True)
def filled(shop: Store) -> Store:
    """Queues `orders` and one with an odd name; `billing` is caught up, `audit` will be stuck."""
    orders = shop.create_queue("orders", SCHEMA, partitions=2, key=["id"])
    orders.append(rows(1_500))
    shop.create_consumer("billing").register("orders", start="latest")
    shop.create_consumer("audit").register("orders", vital=True)
    shop.create_queue(ODD, SCHEMA)
    return shop


@pytest.fixture
def page(open_page: Open) -> Page:
    opened = open_page()
    row(opened, "queues", "orders").wait_for()
    return opened


def row(page: Page, section: str, name: str) -> Locator:
    """The row of a section that has this name in its first column."""
    return page.locator(
        f"table.{section} > tbody > tr", has=page.get_by_role("rowheader", name=name, exact=True)
    )


def expect(locator: Locator):  # type: ignore[no-untyped-def]
    from playwright.sync_api import expect as expecting

    return expecting(locator)


def test_queues_and_consumers_are_shown(page: Page) -> None:
    expect(row(page, "queues", "orders")).to_contain_text("1,5")
    expect(row(page, "consumers", "billing")).to_contain_text("caught up")
    expect(page.locator(".connection")).to_contain_text("live")
    expect(page.locator("#queries .empty")).to_contain_text("penstock.monitor")


def test_an_append_updates_the_numbers_without_a_reload(page: Page, shop: Store) -> None:
    before = int(row(page, "queues", "orders").locator("td").first.inner_text().replace(",", ""))
    page.evaluate("window.same = true")
    shop.queue("orders").append(rows(25))
    expect(row(page, "queues", "orders").locator("td").first).to_have_text(f"{before + 25:,}")
    assert page.evaluate("window.same")


def test_a_stuck_consumer_is_listed_first_and_named_at_the_top(page: Page) -> None:
    expect(page.locator("table.consumers > tbody > tr").first).to_contain_text("audit")
    expect(row(page, "consumers", "audit")).to_contain_text("stuck")
    item = page.locator("#attention li", has_text="audit")
    expect(item).to_contain_text("Stuck")
    item.get_by_role("button").click()
    expander = row(page, "consumers", "audit").get_by_role("button")
    expect(expander).to_be_focused()
    expect(expander).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_role("table", name="Offsets of audit in orders")).to_be_visible()


def test_a_failed_query_is_listed_first_and_announced(page: Page, shop: Store) -> None:
    run = QueryRun("id", "run", "large", "micro-batch", 5, sink="queue 'large'")
    progress = QueryProgress(
        412, 1_000, 990, duration=230.0, durations={"triggerExecution": 230.0}, state_rows=7
    )
    shop.database.run(lambda tx: queries.begin(tx, run))
    shop.database.run(lambda tx: queries.report(tx, run, progress))
    expect(row(page, "queries", "large")).to_contain_text("batch 412")
    expect(row(page, "queries", "large")).to_contain_text("running")
    row(page, "queries", "large").get_by_role("button").click()
    expect(page.locator(".chart figcaption strong")).to_have_text(
        ["Micro-batch duration", "Duration", "Rows", "State"]
    )
    shop.database.run(lambda tx: queries.end(tx, run, QueryError("BAD_ROW", f"It broke at {ODD}")))
    expect(row(page, "queries", "large")).to_contain_text("failed")
    expect(page.locator("#attention li").first).to_contain_text("BAD_ROW: It broke at <script>")
    expect(page.locator("[role=status]")).to_contain_text("Failed: large.")
    assert page.title().endswith("attention – Penstock")


def test_a_name_with_markup_is_shown_as_text(page: Page) -> None:
    expect(row(page, "queues", ODD)).to_have_count(1)
    assert page.locator("table.queues th[scope=row] bdi").all_inner_texts().count(ODD) == 1
    assert page.locator("body script:not([src])").count() == 0


def test_filtering_and_opening_work_by_keyboard_alone(page: Page) -> None:
    page.keyboard.press("/")
    expect(page.locator("#filter")).to_be_focused()
    page.keyboard.type("orders")
    expect(row(page, "queues", ODD)).to_have_count(0)
    expect(page.locator("#queues-title")).to_contain_text("1 of 2")
    expander = row(page, "queues", "orders").get_by_role("button")
    for _ in range(20):
        page.keyboard.press("Tab")
        if expander.evaluate("found => found === document.activeElement"):
            break
    expect(expander).to_be_focused()
    page.keyboard.press("Enter")
    expect(expander).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_role("table", name="Partitions of orders")).to_be_visible()
    page.keyboard.press("Enter")
    expect(expander).to_have_attribute("aria-expanded", "false")
    page.keyboard.press("/")
    page.keyboard.press("Escape")
    expect(row(page, "queues", ODD)).to_have_count(1)


def test_updates_preserve_focus_selection_and_opened_rows(page: Page, shop: Store) -> None:
    expander = row(page, "queues", "orders").get_by_role("button")
    expander.click()
    page.evaluate("getSelection().selectAllChildren(document.querySelector('table.queues thead'))")
    selected = page.evaluate("getSelection().toString()")
    node = expander.element_handle()
    before = row(page, "queues", "orders").locator("td").first.inner_text()
    shop.queue("orders").append(rows(3))
    expect(row(page, "queues", "orders").locator("td").first).not_to_have_text(before)
    assert page.evaluate("getSelection().toString()") == selected != ""
    assert node is not None
    assert node.evaluate("found => found === document.activeElement")
    expect(page.get_by_role("table", name="Partitions of orders")).to_be_visible()


@pytest.mark.parametrize("moving", ["by moveBefore", "by insertBefore"])
def test_a_row_that_moves_keeps_the_focus(page: Page, shop: Store, moving: str) -> None:
    if moving == "by insertBefore":  # as in older browsers, which take the focus away from what is moved
        page.evaluate("delete Element.prototype.moveBefore")
    shop.create_queue(f"moved {moving}", SCHEMA).append(rows(5))
    expect(row(page, "queues", f"moved {moving}")).to_have_count(1)
    for _ in ("greatest first", "least first"):
        page.locator("table.queues").get_by_role("button", name="Rows", exact=True).click()
    expect(page.locator("table.queues > tbody > tr").first).not_to_contain_text("orders")
    first = page.locator("table.queues > tbody > tr").first.get_by_role("button")
    name = first.inner_text()
    first.focus()
    shop.queue(name).append(rows(30_000))
    expect(page.locator("table.queues > tbody > tr").last).to_contain_text(name)
    expect(row(page, "queues", name).get_by_role("button")).to_be_focused()


def test_a_paused_page_does_not_change_until_it_is_resumed(page: Page, open_page: Open, shop: Store) -> None:
    other = open_page()
    cell = row(page, "queues", "orders").locator("td").first
    page.get_by_role("button", name="Pause").click()
    before = cell.inner_text()
    shop.queue("orders").append(rows(7))
    # Another viewer gets the append; this one, on the same server, does not.
    expect(row(other, "queues", "orders").locator("td").first).not_to_have_text(before)
    expect(cell).to_have_text(before)
    page.get_by_role("button", name="Resume").click()
    expect(cell).not_to_have_text(before)


def test_the_colour_scheme_follows_the_system_until_one_is_chosen(open_page: Open) -> None:
    page = open_page(color_scheme="dark")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    assert dark != light
    scheme = page.get_by_role("button", name="Colours")
    scheme.click()
    expect(scheme).to_have_text("dark")
    assert page.evaluate(ground) == dark
    page.reload()
    expect(page.get_by_role("button", name="Colours")).to_have_text("dark")
    assert page.evaluate(ground) == dark


def test_a_page_reports_the_loss_of_its_server_and_reconnects(
    page: Page, shop: Store, monitor: Monitor
) -> None:
    monitor.stop()
    try:
        expect(page.locator(".stale")).to_contain_text("Not live since")
        expect(page.locator("[role=status]")).to_contain_text("Not live")
        shop.queue("orders").append(rows(11))
    finally:
        monitor.start()
    expect(page.locator(".connection")).to_contain_text("live", timeout=15_000)
    expect(page.locator(".stale")).to_have_count(0)
    held = shop.queue("orders").info().rows
    expect(row(page, "queues", "orders").locator("td").first).to_have_text(f"{held:,}")


def test_a_phone_shows_everything_without_scrolling_sideways(open_page: Open) -> None:
    page = open_page(viewport={"width": 390, "height": 800})
    row(page, "queues", "orders").get_by_role("button").click()
    expect(page.get_by_role("table", name="Partitions of orders")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_long_lists_of_queues_are_truncated_until_expanded(page: Page, shop: Store) -> None:
    for number in range(120):
        shop.create_queue(f"many-{number}", SCHEMA)
    expect(page.locator("#queues .rest")).to_contain_text("40 of")
    page.get_by_role("button", name="Show all").first.click()
    expect(row(page, "queues", "many-119")).to_have_count(1)
