"""The monitor page in a real, headless Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from tests.ui.browser.monitor import Monitor

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str | None:
    return os.environ.get("PENSTOCK_TEST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


# Of a module, not of the session: while it is there, this thread has a running event loop, which other
# tests do not expect.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        pytest.skip("there is no Chromium here: scripts/ensure_chromium.sh says how to get one")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=20_000)
    with sync_playwright() as engine:
        opened = engine.chromium.launch(executable_path=path, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[penstock.Store]:
    """A store whose queues and consumers the tests of a module share."""
    opened = penstock.connect(f"sqlite:///{tmp_path_factory.mktemp('shop')}/penstock.db", create=True)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def monitor(shop: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitor]:
    started = Monitor(shop.url, tmp_path_factory.mktemp("monitor") / "log")
    started.start()
    yield started
    started.stop()


Open = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Browser, monitor: Monitor) -> Iterator[Open]:
    """`open_page(color_scheme=…, viewport=…)`: a new page, which asks nobody but the monitor and reports no
    error.
    """
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(watched(browser, monitor.address, options))


@contextmanager
def watched(browser: Browser, address: str, options: dict[str, Any]) -> Iterator[Page]:
    context = browser.new_context(**options)
    page = context.new_page()
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
    page.goto(address)
    yield page
    context.close()
    assert [url for url in asked if not url.startswith(address)] == []
    # A server that is away is what one test is about.
    assert [error for error in errors if "Failed to load resource: net::ERR_" not in error] == []
