"""Every page runs: its commands and scripts give what it says, and each command line is legal."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from parloom import cli
from tests.docs.commands import commands_of, executed, masked, run
from tests.docs.page import DOCS, ROOT, blocks_of, check, updated

APART = {"architecture.md", "add-an-op.md", "reference/exports.md", "reference/pins.md"}
ALL = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
PAGES = [
    "../README.md",
    *(
        name
        for name in ALL
        if name not in APART
        and any(b.language in ("console", "python") for b in blocks_of((DOCS / name).read_text()))
    ),
]
# One worker has the captured models of all pages.
pytestmark = pytest.mark.xdist_group("pages")


@pytest.mark.parametrize("page", PAGES)
def test_outputs_are_what_is_printed(
    page: str, reader: Path, pytestconfig: pytest.Config
) -> None:
    check(page, pytestconfig.getoption("--update-docs"), lambda block: executed(block, run))


COMMANDS = [
    (name, line.strip())
    for name in ["../README.md", *ALL]
    for block in blocks_of((DOCS / name).read_text(encoding="utf-8"))
    if block.language in ("sh", "console")
    for line in block.text.replace("\\\n", " ").splitlines()
    if line.removeprefix("$ ").startswith("parloom ")
]


def parsed(line: str) -> None:
    """Parse a command line as the command would, without running it."""
    words = shlex.split(line.removeprefix("$ ").partition(";")[0], comments=True)
    words = words[1 : words.index(">") if ">" in words else None]
    command = typer.main.get_command(cli.app)
    context = command.make_context("parloom", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_command_lines_are_legal(page: str, line: str) -> None:
    parsed(line)
