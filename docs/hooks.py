"""What the site's builder writes into its reference pages: every command's help, and every public name."""

from __future__ import annotations

from typing import Any

import typer
from typer.cli import get_docs_for_click

import headwise
from headwise.cli.app import app
from headwise.cli.main import register_commands

COMMANDS, NAMES = "<!-- commands -->", "<!-- public names -->"
"""The places in the pages."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in a page's place, as mkdocs asks for each page."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands())
    if NAMES in markdown:
        markdown = markdown.replace(NAMES, names())
    return markdown


def commands() -> str:
    """The help of all commands, as Markdown."""
    register_commands()
    command = typer.main.get_command(app)
    text: str = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="headwise"), name="headwise")
    return text.partition("\n")[2]  # the page has its own title


def names() -> str:
    """A directive for each public function and class, by its own module; functions first."""
    objects = [getattr(headwise, name) for name in headwise.__all__]
    ordered = sorted(objects, key=lambda each: (isinstance(each, type), each.__name__.lower()))
    return "\n\n".join(f"::: {each.__module__}.{each.__qualname__}" for each in ordered)
