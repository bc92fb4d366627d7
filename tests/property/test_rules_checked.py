"""A sample of what `rules_checked` runs for every rule, and wrong rules that it reports."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from parloom.rewrite.known import known_rules
from parloom.rewrite.rules import rule

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def checked() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    yield import_module("rules_checked")
    sys.path.remove(str(BENCHMARKS))


def test_rules_hold_in_numbers_with_gradients(checked: ModuleType) -> None:
    rules = [own.rule for own in known_rules().values()]
    for found in Random(0).sample(rules, 40):
        assert checked.check(found, 3, 0) == [], found.id


@pytest.mark.slow
def test_each_operator_of_rules_is_run(checked: ModuleType) -> None:
    """One rule of each set of operators, on one shape."""
    first = {name.rpartition("_")[0]: own.rule for name, own in known_rules().items()}
    assert len(first) > 50
    for found in first.values():
        assert checked.check(found, 1, 1) == [], found.id


@pytest.mark.parametrize(
    ("inputs", "left", "right"),
    [
        ("x[*, k], w[n, k]", "linear(mul(x, 0.5), w)", "mul(linear(x, w), 0.25)"),
        ("x[*, k], y[*, k]", "cat((x, y), -1)", "cat((y, x), -1)"),
        ("x[b, k], y[b, k]", "gelu(add(x, y))", "add(gelu(x), gelu(y))"),
        ("x[a, k], y[b, k]", "mean(cat((x, y), 0), (0,))",
         "mul(add(mean(x, (0,)), mean(y, (0,))), 0.5)"),
        ("t[v, k], p[b] < v, q[b] < v", "embedding(t, p)", "embedding(t, q)"),
    ],
)  # fmt: skip
def test_wrong_rules_are_reported(checked: ModuleType, inputs: str, left: str, right: str) -> None:
    said = checked.check(rule("wrong", inputs, [left], [right]), 20, 0)
    assert len(said) == 2
    assert said[0].startswith("modulo a prime: output 0 differs where ")
    assert said[1].startswith("in float64: output 0 where ")


def test_gradients_are_compared(checked: ModuleType) -> None:
    """Equal values with another gradient: `detach` says what a gradient is not."""
    found = rule("detached", "x[*, k]", ["alias(x)"], ["detach(x)"])
    said = checked.difference_in_floats(found, {"*0": 2, "k": 3}, 1, 0)
    assert said == "gradient of x where *0 = 2, k = 3"
