"""The site: built without a warning, every link leads somewhere, and nothing is fetched from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import headwise

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class _Links(HTMLParser):
    """The ids of a page, what it links to and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(str(values["id"]))
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        is_loaded = tag in ("script", "img") or (tag == "link" and values.get("rel") in ("stylesheet", "icon"))
        source = values.get("src") or values.get("href")
        if is_loaded and source:
            self.loaded.append(source)


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages: dict[Path, _Links] = {}
    for file in site.rglob("*.html"):
        if file.name != "404.html":
            pages[file] = _Links()
            pages[file].feed(file.read_text(encoding="utf-8"))
    assert len(pages) > 20
    for file, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            place = (file.parent / target).resolve() if target else file
            place = place / "index.html" if place.is_dir() else place
            assert place.exists(), f"{file.relative_to(site)}: {link}"
            if anchor and place in pages:
                assert anchor in pages[place].ids | {"__skip"}, f"{file.relative_to(site)}: {link}"
        assert not [source for source in page.loaded if re.match(r"(https?:)?//", source)]


def test_the_reference_has_every_public_name_and_every_command(site: Path) -> None:
    python = (site / "reference/python/index.html").read_text(encoding="utf-8")
    for name in headwise.__all__:
        value = getattr(headwise, name)
        assert f'id="{value.__module__}.{value.__qualname__}"' in python, name
    commands = (site / "reference/commands/index.html").read_text(encoding="utf-8")
    for name in ("convert", "heal", "audit", "bench", "report"):
        assert f"headwise {name}" in commands
