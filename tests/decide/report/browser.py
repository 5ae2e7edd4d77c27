"""A page in a real headless Chromium, which is watched: requests, messages of the console, errors of scripts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


class Watched:
    """A page and what happened to it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.requests: list[str] = []
        self.messages: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))

    def open(self, file: Path) -> None:
        self.page.goto(file.as_uri())
        self.page.wait_for_load_state("networkidle")

    def is_quiet(self, file: Path) -> bool:
        """Whether nothing but the file was asked for, and nothing was said."""
        local = [url for url in self.requests if not url.startswith(("blob:", "data:"))]
        return local == [file.as_uri()] and not self.messages

    def overflows(self) -> bool:
        """Whether the page has to be scrolled sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


@contextmanager
def browser_page(**settings: Any) -> Iterator[Watched]:
    """A new page, with settings of playwright's ``new_page``."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield Watched(browser.new_page(**settings))
        finally:
            browser.close()
