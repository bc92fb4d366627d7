"""What the README says that commands print is what they print."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from parloom import cli
from tests.docs.page import blocks_of

README = Path(__file__).parents[2] / "README.md"
PROMPT = "$ "


def executed(block: str, run: Callable[[list[str]], str]) -> str:
    """A console block with the output of each command as it is now; `> FILE` shows none."""
    lines = []
    for line in block.splitlines():
        if line.startswith(PROMPT):
            words = shlex.split(line.removeprefix(PROMPT))
            assert words[0] == "parloom"
            hidden = ">" in words
            out = run(words[1 : words.index(">") if hidden else None])
            lines += [line, *([] if hidden else [text.rstrip() for text in out.splitlines()])]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "command",
    [
        "explain runs/gpt",
        "explain runs/stages",
        "report runs/page",
        "plan zoo:gpt --cluster 1x4xH100,1x4xA100",
        "scale zoo:gpt",
    ],
)
def test_what_is_printed(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pytestconfig: pytest.Config,
) -> None:
    def run(arguments: list[str]) -> str:
        assert cli.main(arguments) == 0
        return capsys.readouterr().out

    page = README.read_text(encoding="utf-8")
    (block,) = (b for b in blocks_of(page) if f"$ parloom {command}" in b.text)
    monkeypatch.chdir(tmp_path)
    now = executed(block.text, run)
    if pytestconfig.getoption("--update-docs"):
        README.write_text(page.replace(block.text, now), encoding="utf-8")
    else:
        assert now == block.text, "pytest tests/docs --update-docs writes what is printed now"


def test_another_output_is_another_block() -> None:
    block = "$ parloom a > file\n$ parloom b\nold\n"
    assert executed(block, lambda words: f"{words}\n") == (
        "$ parloom a > file\n$ parloom b\n['b']\n"
    )
