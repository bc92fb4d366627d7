"""The rules of two calls, made again: what the file has."""

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("z3")

from parloom.rewrite.families import FAMILIES
from parloom.rewrite.generation.regenerate import document, entry, main, regenerate
from parloom.rewrite.known import VERSION
from parloom.rewrite.rules import Rule, counterexample, rule

GOLDEN = Path(__file__).parent / "rules_of_two_calls.json"


@pytest.fixture(scope="module")
def found() -> list[Rule]:
    small = [replace(family, most_calls=2) for family in FAMILIES]
    return [own for _, rules in regenerate(small) for own in rules]


def test_the_basis_is_the_known_one(found: list[Rule], pytestconfig: pytest.Config) -> None:
    """`pytest --update-golden` writes it anew."""
    made = document(found)
    if pytestconfig.getoption("--update-golden"):
        GOLDEN.write_text(made, encoding="utf-8")
    assert made == GOLDEN.read_text(encoding="utf-8")


def test_no_rule_of_it_has_a_counterexample(found: list[Rule]) -> None:
    assert len(found) > 100
    for own in found:
        assert not any(counterexample(own, seed) for seed in range(3))


def test_the_command_prints_counts_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rules.json"
    arguments = ["regenerate", "--calls", "2", "--family", "products", "--out", str(path)]
    monkeypatch.setattr("sys.argv", arguments)
    assert main() == 0
    first, total, last = capsys.readouterr().out.splitlines()
    assert first.startswith("products: ")
    assert "proved twice" in first
    assert "after TASO's pruning" in first
    assert total.startswith("rules proved, without renamings: ")
    assert last.startswith("basis: ")
    assert path.read_text(encoding="utf-8").startswith('{"version": 4, "rules": [')


def test_help_is_of_whole_sentences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["regenerate", "--help"])
    with pytest.raises(SystemExit):
        main()
    usage, about, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith("usage: python -m parloom.rewrite.generation.regenerate [-h]")
    assert about.endswith(".")
    assert about.count("[") == about.count("]")


def test_the_file_is_as_it_is_written() -> None:
    """Each entry has what the generator writes of its rule, no more and no less."""
    for name in ("rules.json", "partial.json"):
        text = files("parloom.rewrite").joinpath(name).read_text(encoding="utf-8")
        assert json.loads(text)["version"] == VERSION
        every = json.loads(text)["rules"]
        for own in Random(0).sample(every, 12):
            made = entry(rule(own["id"], own["inputs"], own["left"], own["right"]))
            assert made == own
