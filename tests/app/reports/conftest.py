"""A real browser, if installed, and the requirements for every page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        missing = "no Chromium here: install Debian's chromium and chromium-driver"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture
def shown_well() -> Callable[..., None]:
    """Opens a page: no console messages or requests, nothing too wide, every picture loaded."""

    def check(
        browser: Any, file: Path, width: int, scheme: str = "light", media: str = "screen"
    ) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"media": media, "features": features}
        )
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(file.as_uri())
        assert browser.get_log("browser") == [], "nothing on the console"
        messages = [entry["message"] for entry in browser.get_log("performance")]
        requested = [message for message in messages if "Network.requestWillBeSent" in message]
        assert all('"url":"file:' in message or '"url":"data:' in message for message in requested)
        wide = browser.execute_script(
            "return [document.documentElement.scrollWidth, window.innerWidth]"
        )
        assert wide[0] <= wide[1], "wide tables scroll, or wrap on paper"
        assert browser.execute_script(
            "return [...document.images].every(image => image.naturalWidth > 0)"
        )

    return check
