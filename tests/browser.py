"""Pages in a real Chromium, for tests. Tests that are marked `browser` are skipped without Chromium or Playwright;
`make test-browser` installs both."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
MILLISECONDS = 20_000  # that a page may take
_FLAGS = (
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def missing_browser() -> str:
    """Why tests that are marked `browser` cannot run; "" if they can."""
    missing = [
        name
        for name, found in (("chromium", CHROMIUM), ("playwright", importlib.util.find_spec("playwright")))
        if found is None
    ]
    return f"{' and '.join(missing)} not installed: make test-browser" if missing else ""


@contextlib.contextmanager
def browsing(width: int = 1366, height: int = 768, ignored: str = "$^") -> Iterator[Any]:
    """A new page of Playwright. Every error in the console of the page, or in its scripts, fails the test, unless
    the pattern `ignored` is found in it."""
    playwright = importlib.import_module("playwright.sync_api")
    errors: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(MILLISECONDS)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            yield page
        finally:
            browser.close()
    unexpected = [error for error in errors if not re.search(ignored, error)]
    assert not unexpected, unexpected
