"""The page of a store that contains everything the page can show: accessibility, and many queues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from scripts.page_sample import snapshot
from scripts.page_serving import serving
from tests.ui.browser.conftest import watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.timeout(120)

OPENED = ("orders", "warehouse", "shipments", "customer-totals", "fraud-alerts", "refused")


@contextmanager
def shown(browser: Browser, sample: dict[str, Any], *, every: float = 2.0, **options: Any) -> Iterator[Page]:
    with serving(lambda: sample, every) as address, watched(browser, address, options) as page:
        page.locator("table.queues").wait_for()
        yield page


def test_the_page_is_accessible(browser: Browser) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with shown(browser, snapshot(), color_scheme="light", reduced_motion="reduce") as page:
        for name in OPENED:
            page.locator(".expander", has_text=name).last.click()
        light = Axe().run(page)
        page.emulate_media(color_scheme="dark")
        dark = Axe().run(page, options={"runOnly": ["color-contrast"]})  # all that a scheme changes
    assert light.violations_count == 0, light.generate_report()
    assert dark.violations_count == 0, dark.generate_report()
    assert [rule["id"] for rule in dark.response["passes"]] == ["color-contrast"]


def test_a_long_list_of_problems_is_truncated_until_expanded(browser: Browser) -> None:
    sample = snapshot()
    warehouse = sample["consumers"][0]
    sample["consumers"] = [warehouse | {"consumer": f"stuck {number}"} for number in range(50)]
    with shown(browser, sample) as page:
        assert page.locator("#attention li").count() == 12
        page.locator("#attention").get_by_role("button", name="Show all 53").click()
        assert page.locator("#attention li").count() == 53
        page.get_by_role("button", name="stuck 49").first.click()
        assert page.evaluate("document.activeElement.innerText") == "stuck 49"


def test_an_address_with_a_section_scrolls_to_it(browser: Browser) -> None:
    with shown(browser, snapshot(), viewport={"width": 1200, "height": 500}) as page:
        address = page.url
        page.goto("about:blank")
        page.goto(f"{address}#ledger")
        page.locator("table.queues").wait_for()
        assert page.locator("#ledger").evaluate("found => found.getBoundingClientRect().top") < 200


def test_charts_are_shown_for_known_values(browser: Browser) -> None:
    with shown(browser, snapshot()) as page:
        page.locator("table.queries .expander", has_text="fraud-alerts").click()
        page.locator(".chart canvas").first.wait_for()
        titles = page.locator(".chart figcaption strong").all_inner_texts()
        assert titles == ["Latency", "Duration", "Rows"]
        assert "p99 5.8 ms" in page.locator(".chart figcaption").first.inner_text()
        page.locator(".plot").first.hover()
        page.locator(".chart .when", has_text="at ").first.wait_for()


def test_an_address_that_is_not_http_is_not_a_link(browser: Browser) -> None:
    sample = snapshot()
    sample["queries"][0]["spark_ui"] = "javascript:alert(1)"
    with shown(browser, sample) as page:
        assert page.locator("a[href^=javascript]").count() == 0
        assert page.locator("table.queries tbody a").count() == len(sample["queries"]) - 1


def bare(sample: dict[str, Any], state: str) -> dict[str, Any]:
    """A query of which nothing is known but where it is."""
    nothing = dict.fromkeys(sample["queries"][0])
    return nothing | {
        "id": "/data/old",
        "checkpoint": "/data/old",
        "history": [],
        "state": state,
        "unit": "batch",
    }


def test_a_query_without_reports_is_shown(browser: Browser) -> None:
    sample = snapshot()
    sample["queries"] = [bare(sample, "silent")]
    unknown = {"app_id": None, "query": None, "epoch": 1, "alive": None}
    sample["consumers"][0] |= {"owner": unknown, "lag_seconds": None}
    with shown(browser, sample) as page:
        page.locator("table.queries .expander").click()
        page.locator("table.consumers .expander").first.click()
        assert "No report for a long time" in page.locator("#attention").inner_text()


def test_a_query_known_only_from_its_checkpoint_does_not_need_attention(browser: Browser) -> None:
    sample = snapshot()
    sample["queries"] = [bare(sample, "files only") | {"rows_in": 60, "state_bytes": 2_000}]
    sample["consumers"], sample["dead_letters"] = [], []
    with shown(browser, sample) as page:
        page.locator("table.queries .expander").click()
        assert page.locator("#attention").inner_text() == "Nothing needs attention"
        mark = page.locator("table.queries .mark")
        assert mark.inner_text() == "files only"
        assert "whether it is running is unknown" in (mark.get_attribute("title") or "")
        facts = page.locator("#queries .facts").inner_text()
        assert "its checkpoint only: whether it is running is unknown" in facts
        assert "2.0 kB" in facts
        assert "1 files only" in page.locator(".figures").inner_text()


def test_pressing_an_owner_leads_to_its_query(browser: Browser) -> None:
    sample = snapshot()
    # Of one that has told nothing to this store there is no row.
    sample["consumers"][2]["owner"] |= {"app_id": "0123456789abcdef", "query": None}
    with shown(browser, sample, viewport={"width": 1360, "height": 500}) as page:
        rows = page.locator("table.consumers > tbody > tr")
        assert "01234567… alive" in rows.nth(2).inner_text()
        assert rows.nth(2).get_by_role("button").count() == 1
        rows.filter(has_text="large-orders").get_by_role("button", name="large-orders").last.click()
        focused = page.evaluate("document.activeElement.id")
        assert focused == f"open-queries-{sample['queries'][4]['id']}"
        assert sample["queries"][4]["name"] == "large-orders"
        assert page.locator("#queries tr.about").count() == 1


def test_the_duration_of_a_micro_batch_is_not_shown_as_latency(browser: Browser) -> None:
    with shown(browser, snapshot(), viewport={"width": 1360, "height": 900}) as page:
        rows = page.locator("table.queries > tbody > tr")
        batches = rows.filter(has_text="customer-totals").locator("td", has_text="batch 4")
        assert batches.all_inner_texts() == ["batch 41,208", "batch 418 ms", "batch 490 ms"]
        assert "not the latency of a row" in (batches.last.locator("span").first.get_attribute("title") or "")
        assert "1.9 ms\t5.8 ms" in rows.filter(has_text="fraud-alerts").inner_text()
        rows.filter(has_text="customer-totals").get_by_role("button").click()
        page.locator(".chart canvas").first.wait_for()
        titles = page.locator(".chart figcaption strong").all_inner_texts()
        assert titles == ["Micro-batch duration", "Duration", "Rows", "State"]
        facts = page.locator("#queries .facts").inner_text()
        assert "p50 418 ms, p90 466 ms, p99 490 ms, max 490 ms, of the newest 100 reported" in facts


def test_an_update_of_one_of_five_hundred_queues_changes_only_that_one(browser: Browser) -> None:
    sample = snapshot()
    orders = sample["queues"][3] | {"history": sample["queues"][3]["history"][-4:]}
    sample["queues"] = [orders | {"name": f"queue {number}"} for number in range(500)]
    with shown(browser, sample, every=0.5) as page:
        assert page.locator("table.queues > tbody > tr").count() == 40
        page.get_by_role("button", name="Show all 500").click()
        assert page.locator("table.queues > tbody > tr").count() == 500
        page.evaluate(
            """
            window.touched = [];
            const body = document.querySelector("table.queues > tbody");
            const rowOf = node => (node.nodeType === Node.TEXT_NODE ? node.parentElement :
            node).closest("tr"); new MutationObserver(found => touched.push(...found.map(each =>
            rowOf(each.target)?.rowIndex ?? "all")))
                .observe(body, {subtree: true, childList: true, characterData: true, attributes: true});
            """
        )
        sample["queues"][250]["rows"] += 1
        page.wait_for_function("touched.length > 0")
        assert page.evaluate("touched") == [251]
        page.locator("#filter").fill("queue 499")
        page.locator("table.queues > tbody > tr").nth(1).wait_for(state="detached")
        assert page.locator("table.queues .expander").inner_text() == "queue 499"
