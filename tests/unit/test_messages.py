"""Messages on stderr: as wide as the terminal, and whole where there is none."""

import fcntl
import os
import shlex
import struct
import sys
import termios

import pytest

from parloom.cli_output import say
from parloom.errors import shell_word
from parloom.report.output import message


def test_messages_are_as_wide_as_the_terminal_and_hang() -> None:
    text = "error: nothing was written: " + "many words " * 12 + "\n" + "one item of more " * 8
    shown = message(text, 60).split("\n")
    assert all(len(line) <= 60 for line in shown)
    assert [line for line in shown if not line.startswith(" ")] == [shown[0]]
    assert sum(line.startswith("    ") for line in shown) > 1  # what is broken off an item hangs
    assert " ".join(" ".join(shown).split()) == " ".join(text.split())
    path = f"cannot read /{'very/' * 30}long.json: no such file"
    assert f"/{'very/' * 30}long.json:" in message(path, 60)  # to be copied


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("runs/a-b_1.json", "runs/a-b_1.json"),
        ("up:linear#0", "up:linear#0"),
        ("weiß.0", "weiß.0"),
        ("my runs/plan.json", "'my runs/plan.json'"),
        ("<b>up</b>:linear#0", "'<b>up</b>:linear#0'"),
        ("a'b", "'a'\"'\"'b'"),
        ("#0", "'#0'"),
        ("$HOME;x", "'$HOME;x'"),
    ],
)
def test_words_of_commands_are_typed_as_they_are_printed(word: str, typed: str) -> None:
    assert shell_word(word) == typed
    assert shlex.split(typed) == [word]


def test_messages_for_no_terminal_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    say("word " * 100)
    assert capsys.readouterr().err.count("\n") == 1


def test_messages_for_a_terminal_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        say("word " * 20)
        lines = os.read(leader, 1000).decode().splitlines()
    os.close(leader)
    assert [len(line) <= 40 for line in lines] == [True] * len(lines)
    assert len(lines) == 3
