"""Files of rules that somebody edited: what is wrong, of which rule, where."""

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from parloom import cli
from parloom.errors import InputError
from parloom.rewrite import known


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file, in a place where it may be edited."""
    text = files("parloom.rewrite").joinpath(known.FILE).read_text(encoding="utf-8")
    path = tmp_path / known.FILE
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(known, "files", lambda _: tmp_path)
    known.known_rules.cache_clear()
    yield path
    known.known_rules.cache_clear()


def with_entry(path: Path, change: dict[str, Any]) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    rules = document["rules"]
    rules[1] = {key: value for key, value in (rules[1] | change).items() if value is not None}
    path.write_text(json.dumps(document), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"left": ["add(x, q)"]}, "q: neither an input nor a size of one"),
        ({"left": ["linear(x)"]}, "the left side cannot be computed"),
        ({"right": ["relu(x)[3]"]}, "the right side cannot be computed: IndexError"),
        (
            {"left": ["div(x, 0)"]},
            "the left side cannot be computed: NotImplementedError: div by zero",
        ),
        ({"left": ["softmax(2, -1)"]}, "the left side cannot be computed"),
        ({"left": ["no_such(x)"]}, "no_such says not what it computes"),
        ({"left": [3]}, "left is no list of texts: [3]"),
        ({"left": "x"}, "left is no list of texts: 'x'"),
        ({"left": ["x", "y"]}, "2 outputs on the left, 1 on the right"),
        ({"left": ["add(x"]}, "cannot be read"),
        ({"right": ["sum(x)"]}, "both sides have different shapes"),
        ({"inputs": 7}, "TypeError"),
        ({"inputs": None}, "KeyError('inputs')"),
        ({"narrow": ["float8"]}, "narrow: ['float8']; there are: bfloat16, float16"),
        ({"right": ["mul(y, y)"]}, "both sides are not equal: "),
        ({"right": ["mul(x, y)"]}, "it was edited, and is not proved a second time"),
        ({"id": "mine"}, "mine: it was edited, and is not proved a second time"),
        ({"id": "add_304601"}, "add_304601 is there twice"),
        ({"id": None}, "rule 1 has no id"),
    ],
)
def test_a_rule_that_cannot_be_is_named(edited: Path, change: dict[str, Any], message: str) -> None:
    with_entry(edited, change)
    with pytest.raises(InputError) as caught:
        known.known_rules()
    said = str(caught.value)
    assert said.startswith(f"{edited}: {'' if 'id' in change else 'mul_f7b29f: '}")
    assert message in said
    assert known.RESTORE in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no file of rules: JSONDecodeError"),
        ("[" * 100_000, "no file of rules: RecursionError"),
        ("[]", "no file of rules: TypeError"),
        ('{"version": 4}', "no file of rules: KeyError: 'rules'"),
        ('{"rules": []}', "no file of rules: KeyError: 'version'"),
        ('{"version": 3, "rules": []}', "version 3, not 4"),
        ('{"version": 4, "rules": {}}', "its rules are no list"),
        ('{"version": 4, "rules": [7]}', "rule 0 has no id: 7"),
    ],
)
def test_what_is_no_file_of_rules(edited: Path, text: str, message: str) -> None:
    edited.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        known.known_rules()


def test_a_file_that_is_not_there(edited: Path) -> None:
    edited.unlink()
    with pytest.raises(InputError, match="no file of rules: FileNotFoundError"):
        known.known_rules()


def test_the_command_says_so(edited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_entry(edited, {"left": ["relu(x)[3]"]})
    assert cli.main(["plan", "zoo:mlp", "--cluster", "1x2xcpu", "--forbid", "rewrite=x"]) == 2
    assert "mul_f7b29f" in capsys.readouterr().err


def test_a_number_by_which_nothing_divides_is_no_case() -> None:
    scaled = next(own for own in known.known_rules().values() if own.scaling == "div")
    assert not known.is_rule(f"{scaled.rule.id}_0")
