"""Programs that are equal on a part of their results: what corrects them, proved and in numbers."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("z3")

from parloom.ir.ops.algebra import Window
from parloom.rewrite.generation.basis import distinct
from parloom.rewrite.generation.halos import CASES, WHOLE, prove_by_halos
from parloom.rewrite.generation.partial import FAMILIES, Partial
from parloom.rewrite.generation.regenerate import corrected, document
from parloom.rewrite.known import holds, partial_rules
from parloom.rewrite.modular import PRIME, Ints
from parloom.rewrite.rules import Rule, counterexample, prove, rule
from tests.unit.test_axioms import NUMBERS, READING

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = [own for own in FAMILIES if own.name in ("padded_3", "seams_3")]

X, W = "x[b, k, 1 + 1 + p + 1 + 1]", "w[o, k, 1 + 1 + 1]"
LEFT = "conv1d(pad(x, (1, 1), 'reflect'), w)"
MUTANT = "conv1d(x, w, None, (1,), (1,))"
MIDDLE = (
    f"split_with_sizes(split_with_sizes({MUTANT}, (1 + 1 + p + 1, 1), -1)[0],"
    " (1, 1 + p + 1), -1)[1]"
)


def edge(side: int, reach: int = 2, kept: int | None = None, mode: str = "reflect") -> str:
    """The first or the last place, of so many places of the operand."""
    places = " + ".join("1" * reach)
    rest = " + ".join([*"1" * (2 - reach), "p + 1 + 1"])
    sizes = f"({places}, {rest})" if side == 0 else f"({rest}, {places})"
    if side == 1:
        sizes = f"({' + '.join(['1 + 1 + p', *'1' * (2 - reach)])}, {places})"
    part = f"split_with_sizes(x, {sizes}, -1)[{side}]"
    own = side if kept is None else kept
    return f"split_with_sizes(conv1d(pad({part}, (1, 1), '{mode}'), w), (1, 1), -1)[{own}]"


def joined(first: str, middle: str, last: str) -> Rule:
    right = f"cat((cat(({first}, {middle}), -1), {last}), -1)"
    return rule("joined", f"{X}, {W}", [LEFT], [right])


def seam(is_corrected: bool) -> Rule:
    """Two operands beside each other; what is wrong at the seam is made of ends of both."""
    inputs = f"{X}, {X.replace('x', 'y').replace('p', 'q')}, {W}"
    whole = "conv1d(cat((x, y), -1), w, None, (1,), (1,))"
    ends = (
        "split_with_sizes(x, (1 + 1 + p, 1 + 1), -1)[1]",
        "split_with_sizes(y, (1 + 1, q + 1 + 1), -1)[0]",
    )
    convs = ", ".join(f"conv1d({own}, w, None, (1,), (1,))" for own in ends)
    between = (
        f"split_with_sizes(split_with_sizes(cat(({convs}), -1), (1 + 1 + 1, 1), -1)[0],"
        " (1, 1 + 1), -1)[1]"
    )
    before = f"split_with_sizes({whole}, (1 + 1 + p + 1, 1 + 1 + 1 + q + 1 + 1), -1)[0]"
    after = f"split_with_sizes({whole}, (1 + 1 + p + 1 + 1 + 1, 1 + q + 1 + 1), -1)[1]"
    left = "cat((conv1d(x, w, None, (1,), (1,)), conv1d(y, w, None, (1,), (1,))), -1)"
    right = f"cat((cat(({before}, {between}), -1), {after}), -1)" if is_corrected else whole
    return rule("seam", inputs, [left], [right])


TRUE = {"reflected": joined(edge(0), MIDDLE, edge(1)), "seam": seam(is_corrected=True)}
WRONG = {
    "no correction": rule("none", f"{X}, {W}", [LEFT], [MUTANT]),
    "one side alone": joined(
        edge(0), MIDDLE, f"split_with_sizes({MUTANT}, (1 + 1 + p + 1, 1), -1)[1]"
    ),
    "sides exchanged": joined(edge(1), MIDDLE, edge(0)),
    "the other place of the part": joined(edge(0, kept=1), MIDDLE, edge(1)),
    "another padding": joined(edge(0, mode="replicate"), MIDDLE, edge(1)),
    "the middle one place further": joined(
        edge(0),
        f"split_with_sizes(split_with_sizes({MUTANT}, (1 + p + 1, 1 + 1), -1)[0],"
        " (1, p + 1), -1)[1]",
        edge(1),
    ),
    "no correction of a seam": seam(is_corrected=False),
}


@pytest.fixture(scope="module")
def checked() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    yield import_module("rules_checked")
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("name", TRUE)
def test_corrected_programs_are_proved_twice(name: str, checked: ModuleType) -> None:
    assert prove(TRUE[name]) == ""
    assert prove_by_halos(TRUE[name]) == ""
    assert checked.check(TRUE[name], 10, 0) == []


@pytest.mark.parametrize("name", WRONG)
def test_wrong_corrections_are_refused_by_each_proof(name: str) -> None:
    assert prove(WRONG[name])
    assert prove_by_halos(WRONG[name]).startswith("Z3 says")
    assert any(counterexample(WRONG[name], seed) for seed in range(3))


def test_a_halo_that_is_a_place_too_small_is_refused() -> None:
    """Of a kernel of five: a part of three places in the place of four."""
    (found,) = [own.rule for own in partial_rules().values() if _is(own.rule, 5, "reflect")]
    (right,) = map(str, found.right)
    assert right.count("(1 + 1 + 1 + 1, s2 + 1 + 1 + 1 + 1)") == 1
    less = right.replace(
        "(1 + 1 + 1 + 1, s2 + 1 + 1 + 1 + 1)", "(1 + 1 + 1, 1 + s2 + 1 + 1 + 1 + 1)"
    )
    less = less.replace(
        "'reflect'), x1), (1 + 1, 1 + 1), -1)[0]", "'reflect'), x1), (1 + 1, 1), -1)[0]", 1
    )
    inputs = ", ".join(map(str, found.inputs))
    left = [str(own) for own in found.left]
    assert prove(rule("whole", inputs, left, [right])) == ""
    wrong = rule("less", inputs, left, [less])
    assert prove(wrong).startswith("output 0 has two normal forms")
    assert prove_by_halos(wrong).startswith("Z3 says")
    assert counterexample(wrong, 0)


def _is(found: Rule, kernel: int, mode: str) -> bool:
    left = str(found.left[0])
    return len(found.inputs) == 2 and f"({kernel // 2}, {kernel // 2}), '{mode}'" in left


def test_each_rule_holds_in_numbers_with_gradients(checked: ModuleType) -> None:
    assert len(partial_rules()) == 22
    for own in partial_rules().values():
        assert holds(own.rule)
        assert checked.check(own.rule, 3, 0) == [], own.rule.id


def test_the_file_has_what_is_generated() -> None:
    """Of the smallest kernel, made again."""
    made = [own for _, rules in corrected(SMALL) for own in rules]
    assert len(made) == 4
    lines = {line.strip().rstrip(",") for line in document(made).splitlines()[1:-1]}
    known = document([own.rule for own in partial_rules().values()]).splitlines()
    assert lines <= {line.strip().rstrip(",") for line in known}


def test_what_parts_do_not_give_is_left_out() -> None:
    """Around a circle the first places are of the last ones: no part of the operand has both."""
    programs = Partial(SMALL[0])
    pairs = {str(pair.original.term): pair for pair in programs.pairs()}
    around = pairs["conv1d(pad(x, (1, 1), 'circular'), w)"]
    assert around.wrong == (0, 4)
    assert programs.corrected(around) is None
    found = distinct(list(programs.candidates()))
    assert [str(own.left[0]) for own in found] == [
        "conv1d(pad(x0, (1, 1)), x1)",
        "conv1d(pad(x0, (1, 1), 'reflect'), x1)",
        "conv1d(pad(x0, (1, 1), 'replicate'), x1)",
    ]


def _near(i: int, j: int, a: Ints, b: Ints) -> Ints:
    if a.ndim != 3 or b.ndim != 3 or a.shape[1] != b.shape[1]:
        raise ValueError("no convolution")
    if j != (b.shape[2] - 1) * (1 + i % 2) or a.shape[2] <= j:
        raise ValueError("another reach")
    moved = NUMBERS.windows(a, 2, Window(b.shape[2], 1, dilation=1 + i % 2))
    return NUMBERS.product([["b", "c", "p", "r"], ["o", "c", "r"]], ["b", "o", "p"], [moved, b])


@pytest.mark.parametrize("line", [WHOLE, *(line for lines in CASES.values() for line in lines)])
def test_cases_hold_in_numbers(line: str) -> None:
    rng, fits = np.random.default_rng(0), 0
    reading: dict[str, Any] = {**READING, "near": _near, "And": lambda *own: all(own)}
    equation, _, condition = line.partition(" if ")
    for _ in range(30_000):
        values: dict[str, Any] = {n: int(rng.integers(0, 6)) for n in "ijse"}
        shapes = {
            "a": rng.integers(1, 6, 3),
            "b": rng.integers(1, 4, 3),
            "v": rng.integers(1, 4, 1),
        }
        if "cat" in equation:
            shapes["b"] = np.array([*shapes["a"][:2], rng.integers(1, 6)])
        values |= {name: rng.integers(0, PRIME, shape) for name, shape in shapes.items()}
        try:
            if condition and not eval(condition, reading, values):
                continue
            one, other = (eval(side, reading, values) for side in equation.split(" == "))
        except (ValueError, IndexError, np.exceptions.AxisError):
            continue
        assert one.shape == other.shape
        assert (one == other).all()
        fits += 1
        if fits == 3:
            return
    assert fits, "no shapes were drawn that fit"
