"""Every command of the table of promises shows what it is to show."""

import re
import shutil
from pathlib import Path

from tests.docs.commands import run
from tests.docs.page import DOCS
from tests.docs.test_terminal import FOLDER

PROMISES = 9
PAGE = DOCS / "explanation/promises.md"


def rows() -> list[list[str]]:
    """Promise, command and words to look for of every row."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [re.split(r" ?\| ?", line)[1:-1] for line in lines if line.startswith("|")][2:]


def missing(command: str, wanted: str) -> list[str]:
    """Words of a row that its command does not print; fails where its exit code is another."""
    line, *more = re.findall(r"`parloom ([^`]+)`(?: \(exit code (\d)\))?", command)
    assert not more, f"one command a row: {command}"
    said, code = run(line[0].split())
    assert code == int(line[1] or 0), said
    return [words for words in re.findall(r"`([^`]+)`", wanted) if words not in said]


def test_each_promise_is_shown(reader: Path) -> None:
    shutil.copy(FOLDER / "lab.yaml", reader)
    found = rows()
    assert sum(bool(promise) for promise, _, _ in found) == PROMISES
    assert [lacks for _, command, words in found if (lacks := missing(command, words))] == []


def test_a_promise_that_is_not_kept_is_seen(reader: Path) -> None:
    assert missing("`parloom cluster show 2xcpu`", "`2 x cpu`, `2 x gpu`") == ["2 x gpu"]
