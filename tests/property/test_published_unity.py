"""How `published_unity` reads Unity's rules: a few of each verdict, in the notation of the file."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from parloom.rewrite.generation.factor_rules import (
    exchanged,
    inverse_rules,
    operation,
    parallel_rules,
)
from parloom.rewrite.rules import Rule

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ANY, BUT_ONE, TWO = "at any degree", "at any degree but that of dim 0", "at degree 2"
RULES = {
    "samples are split": (
        "linear(partition[dim=1](x0), replicate[dim=0](x1))", "partition[dim=1](linear(x0, x1))",
        "derived", ANY),
    "outputs are split": (
        "linear[activation=2](replicate[dim=0](x0), partition[dim=1](x1))",
        "partition[dim=2](relu(linear(x0, x1)))", "derived", ANY),
    "two outputs": (
        "reduce[dim=2](x0) ; partition[dim=2](partition[dim=1](x0))",
        "reduce[dim=2](partition[dim=2](x0)) ; partition[dim=1](partition[dim=2](x0))",
        "derived", ANY),
    "as many tensors as the degree": (
        "ew_add(partition[dim=1](x0), partition[dim=1](x1))",
        "reduce[dim=0](partition[dim=1](concat[axis=0](x0, x1)))", "derived", BUT_ONE),
    "twice as many tensors": (
        "ew_add(reduce[dim=1](x0), reduce[dim=1](x1))",
        "reduce[dim=1](reduce[dim=1](concat[axis=1](x0, x1)))", "derived", TWO),
    "chunks of a concatenation": (
        "concat[axis=1](reduce[dim=1](x0), reduce[dim=1](x1))",
        "reduce[dim=1](concat[axis=1](x0, x1))", "false, true where each piece", ""),
    "a tensor that is not read": (
        "relu(linear(linear(x0, x1), x2))",
        "linear[activation=2](linear(x0, concat[axis=0](x1, x3)), x2)",
        "false, true where tensors", ""),
    "an operand of its own": (
        "linear(ew_add(x0, x1), x0)",
        "linear(reduce[dim=0](concat[axis=0](x0, x1)), concat[axis=0](x0, x1))",
        "false, true where tensors", ""),
    # Not of the file: one thing of a true rule is wrong.
    "a sum through a function": (
        "relu(reduce[dim=1](x0))", "reduce[dim=1](relu(x0))", "false", ""),
    "another dim": (
        "linear(partition[dim=1](x0), replicate[dim=0](x1))", "partition[dim=2](linear(x0, x1))",
        "open", ""),
    "no copies": ("linear(partition[dim=1](x0), x1)", "partition[dim=1](linear(x0, x1))",
                  "open", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def unity() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    yield import_module("published_unity")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def known(unity: ModuleType) -> list[Rule]:
    found = [rule for own in unity.OPERATIONS for rule in parallel_rules(operation(*own))]
    return [*found, *inverse_rules(unity.RANK), *exchanged(unity.RANK)]


@pytest.mark.parametrize("name", RULES)
def test_rules_have_a_verdict(unity: ModuleType, known: list[Rule], name: str) -> None:
    source, target, found, where = RULES[name]
    verdict = unity.verdict({"id": name, "source": source, "target": target}, known)
    assert verdict.found.startswith(found)
    assert (verdict.found == found) == (found in ("false", "open"))
    assert verdict.where == where
    assert bool(verdict.counterexample) == (found != "derived")
