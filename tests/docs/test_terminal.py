"""Every verb on narrow and wide terminals: nothing is wider, and all is as it was looked at."""

import shutil
from pathlib import Path

import pytest
import typer
from rich.cells import cell_len

from parloom import cli
from tests.docs.commands import CODE, commands_of, executed, run

FOLDER = Path(__file__).parent / "terminal"
COLUMNS = [80, 120]
FILES = ["lab.yaml", "train.py"]  # beside the commands
ELSEWHERE = {"calibrate", "doctor"}  # they print what this machine is
# Messages are lines that a terminal breaks where it likes, and a log keeps whole.
SENTENCES = {"run", "verify"}


def screens(columns: int) -> Path:
    """The file of commands and what they print on a terminal of so many columns."""
    return FOLDER / f"{columns}.txt"


def commands(columns: int) -> list[str]:
    return ["\n".join(lines) for lines, _ in commands_of(screens(columns).read_text("utf-8"))]


@pytest.mark.slow
@pytest.mark.parametrize("columns", COLUMNS)
def test_screens_are_as_they_were(
    columns: int, reader: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in FILES:
        shutil.copy(FOLDER / name, reader)
    wanted = screens(columns).read_text("utf-8")
    found = executed(wanted, run)
    if pytestconfig.getoption("--update-docs"):
        screens(columns).write_text(found, encoding="utf-8")
    else:
        assert found == wanted, "screens changed; pytest tests/docs --update-docs"


@pytest.mark.parametrize("columns", COLUMNS)
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    for command, printed in commands_of(screens(columns).read_text("utf-8")):
        assert printed, f"{command} prints nothing"
        if not command[-1].endswith(CODE) and command[-1].split()[2] not in SENTENCES:
            assert too_wide(printed, columns) == []


def too_wide(printed: list[str], columns: int) -> list[str]:
    return [line for line in printed if cell_len(line) > columns]


def test_a_line_that_is_too_wide_is_seen() -> None:
    assert too_wide(["é" * 80, "é" * 81], 80) == ["é" * 81]


def test_screens_are_of_every_verb_and_alike() -> None:
    narrow, wide = map(commands, COLUMNS)
    assert narrow == wide
    group = typer.main.get_command(cli.app)
    assert {line.split()[2] for line in narrow} == set(group.commands) - ELSEWHERE  # type: ignore[attr-defined]


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_machine_is_told_in_lines_that_fit(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out, code = run(["doctor"])
    assert (code, "torch: " in out) == (0, True)
    assert too_wide(out.splitlines(), columns) == []
