"""Every page runs: its commands and scripts give what it says, and each command line is legal."""

import shlex
from pathlib import Path

import pytest
import typer

from parloom import cli
from tests.docs.commands import executed, run
from tests.docs.page import DOCS, blocks_of, check, updated

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


@pytest.mark.parametrize("page", PAGES)
def test_outputs_are_what_is_printed(page: str, reader: Path, pytestconfig: pytest.Config) -> None:
    def rerun(block: str) -> str:
        return executed(block, run)

    check(page, pytestconfig.getoption("--update-docs"), rerun)


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


@pytest.mark.parametrize("line", ["parloom verify", "parloom verify runs --pin x=n"])
def test_an_illegal_command_line_is_seen(line: str) -> None:
    with pytest.raises(Exception, match=r"[Mm]issing|[Nn]o such"):
        parsed(line)


def test_another_output_is_another_block() -> None:
    block = "$ parloom a > file\n$ parloom b \\\n    c\nold\n"
    now = executed(block, lambda words: (f"{words}\n", 0))
    assert now == "$ parloom a > file\n$ parloom b \\\n    c\n['b', 'c']\n"


def test_an_exit_code_must_be_said() -> None:
    with pytest.raises(AssertionError, match="exit code 3: full"):
        executed("$ parloom a\n", lambda words: ("full", 3))
    block = '$ parloom a; echo "exit code $?"\n'
    assert executed(block, lambda words: ("full\n", 3)) == f"{block}full\nexit code 3\n"


@pytest.mark.parametrize(
    ("step", "loss", "ms", "same"),
    [(1, "312", 12.9, True), (2, "305", 41.2, False), (1, "405", 41.2, False)],
)
def test_of_a_run_only_what_is_measured_may_differ(
    step: int, loss: str, ms: float, same: bool
) -> None:
    line = "step {} loss 2.{} | {} ms | {} samples/s | process 431 MiB\n"
    block = f"$ parloom run a -- b\n{line.format(1, '305', 41.2, '1.5k')}"
    now = executed(block, lambda words: (line.format(step, loss, ms, "893"), 0))
    assert (now == block) is same


def test_files_of_a_page_are_written_in_parts(reader: Path) -> None:
    part = '```python title="{}"\n{}\n```\n'
    page = part.format("a.py", "x = 1") + part.format("a.py", "x += 1") + part.format("b.py", "y")
    assert updated(page, "page", lambda block: block) == page
    assert (reader / "a.py").read_text() == "x = 1\n\nx += 1\n"
