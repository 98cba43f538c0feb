"""Takes screenshots of the built monitor page with the data of `page_sample`, for the documentation.

The page uses system fonts, which vary between Linux systems. If Inter is installed (Debian: fonts-inter), it
is used instead.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from scripts.page_sample import NOW, snapshot
from scripts.page_serving import serving

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
FLAGS += ["--disable-component-update", "--disable-sync", "--force-color-profile=srgb"]


FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
  <include>/etc/fonts/fonts.conf</include>
  <match target="pattern">
    <test name="family" qual="all" compare="not_eq"><string>ui-monospace</string></test>
    <test name="family" qual="all" compare="not_eq"><string>SFMono-Regular</string></test>
    <test name="family" qual="all" compare="not_eq"><string>Menlo</string></test>
    <test name="family" qual="all" compare="not_eq"><string>Consolas</string></test>
    <test name="family" qual="all" compare="not_eq"><string>DejaVu Sans Mono</string></test>
    <test name="family" qual="all" compare="not_eq"><string>Liberation Mono</string></test>
    <test name="family" qual="all" compare="not_eq"><string>monospace</string></test>
    <edit name="family" mode="prepend" binding="strong"><string>Inter</string></edit>
  </match>
</fontconfig>
"""


@contextmanager
def open_page(browser: Browser, address: str, scheme: str, width: int, height: int) -> Iterator[Page]:
    context = browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=1.5,
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
        timezone_id="Europe/Berlin",
    )
    page = context.new_page()
    page.clock.set_fixed_time(NOW)
    page.goto(address)
    page.get_by_role("heading", name="Queues").wait_for()
    yield page
    context.close()


def save_screenshot(page: Page, name: str) -> None:
    """Save a screenshot with few colours, which has a third of the size and looks the same."""
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    quantized = image.quantize(160, kmeans=2, dither=Image.Dither.NONE)
    target = Path(sys.argv[1] if len(sys.argv) > 1 else DOCS) / name
    quantized.save(target, optimize=True)
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


def main() -> None:
    chromium = os.environ.get("PENSTOCK_TEST_CHROMIUM") or "/usr/bin/chromium"
    with serving(snapshot) as address, TemporaryDirectory() as folder, sync_playwright() as engine:
        fonts = Path(folder) / "fonts.conf"
        fonts.write_text(FONTS)
        settings: dict[str, str | float | bool] = {**os.environ, "FONTCONFIG_FILE": str(fonts)}
        browser = engine.chromium.launch(executable_path=chromium, args=FLAGS, env=settings)
        for scheme in ("light", "dark"):
            with open_page(browser, address, scheme, 1360, 1000) as page:
                save_screenshot(page, f"monitor-{scheme}.png")
                for name in ("customer-totals", "fraud-alerts"):
                    page.locator("table.queries .expander", has_text=name).click()
                page.locator("#queries").evaluate("found => window.scrollTo(0, found.offsetTop - 46)")
                page.locator(".plot canvas").first.wait_for()
                save_screenshot(page, f"monitor-queries-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main()
