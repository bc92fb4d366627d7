"""Generated candidates: all are true, none is missed, and few of them say it all."""

from itertools import product

import numpy as np
import pytest

from parloom.rewrite.generate import Equal, Family, Generator, Operator, along, plain, splits, sums
from parloom.rewrite.generation.basis import basis, distinct, follows, renamed
from parloom.rewrite.rules import Rule, counterexample, prove, rule
from parloom.rewrite.terms import Name, Term, calls_in

FAMILY = Family(
    "small",
    "x[b, k], y[b, k], w[n, k]",
    (
        Operator("linear", 2, plain()),
        Operator("add", 2, plain(), commutes=True),
        Operator("gelu", 1, plain()),
        Operator("cat", 2, along(together=True)),
        Operator("split_with_sizes", 1, splits, results=2),
        Operator("sum", 1, sums),
    ),
    2,
)


@pytest.fixture(scope="module")
def made() -> Generator:
    generator = Generator(FAMILY)
    generator.run()
    return generator


def as_rule(equal: Equal) -> Rule:
    return Rule("", equal.inputs, (equal.left,), (equal.right,))


def test_all_candidates_are_proved(made: Generator) -> None:
    assert len(made.equal) > 50
    for equal in made.equal:
        assert prove(as_rule(equal)) == ""
    for equal in made.equal[::20]:
        assert counterexample(as_rule(equal), 0) == ""


def test_programs_of_different_classes_differ(made: Generator) -> None:
    programs = [program for some in made.by_calls for program in some]
    assert len(programs) == len(made.classes)
    for one, other in product(programs[:40], programs):
        same = all(
            a.shape == b.shape and np.array_equal(a, b)
            for a, b in zip(one.values, other.values, strict=True)
        )
        assert same == (one is other)


def test_programs_have_as_many_calls_as_they_say(made: Generator) -> None:
    for calls, programs in enumerate(made.by_calls):
        for program in programs:
            assert len(list(calls_in(program.term))) == calls == len(program.calls)


@pytest.mark.parametrize(
    "known",
    [
        "split_with_sizes(cat((x0, x1), -2), (s0, s2), -2)[0] = x0",
        "add(linear(x0, x1), linear(x0, x1)) = linear(x0, add(x1, x1))",
        "gelu(cat((x0, x0), -1)) = cat((gelu(x0), gelu(x0)), -1)",
        "sum(linear(x0, x1), (-2,)) = linear(sum(x0, (-2,)), x1)",
    ],
)
def test_known_rules_are_among_them(made: Generator, known: str) -> None:
    left, right = known.split(" = ")
    found = {own.id for own in distinct(made.equal)}
    assert {known, f"{right} = {left}"} & found


def test_all_follow_from_the_basis_and_none_of_it_from_the_rest(made: Generator) -> None:
    rules = distinct(made.equal)
    few = basis(rules)
    assert 5 < len(few) < len(rules)
    assert all(follows(own, few) for own in rules)
    for own in few:
        assert not follows(own, [other for other in few if other is not own])


def test_renamings_are_one_rule() -> None:
    declared = Generator(FAMILY).inputs
    x, y = Name("x"), Name("y")
    one = Equal(declared[:2], Term("add", (x, y)), Term("add", (y, x)))
    other = Equal(declared[:2], Term("add", (y, x)), Term("add", (x, y)))
    turned = renamed(one)
    assert (turned.inputs, turned.left) == (renamed(other).inputs, renamed(other).left)
    assert len(distinct([one, other])) == 1


def test_what_does_not_follow_is_kept() -> None:
    commutes = rule("commutes", "x[a, b], y[a, b]", ["add(x, y)"], ["add(y, x)"])
    associates = rule(
        "associates", "x[a, b], y[a, b], z[a, b]", ["add(x, add(y, z))"], ["add(add(x, y), z)"]
    )
    turned = rule(
        "turned", "x[a, b], y[a, b], z[a, b]", ["add(x, add(y, z))"], ["add(y, add(x, z))"]
    )
    assert [own.id for own in basis([commutes, associates, turned])] == ["commutes", "associates"]
    assert [own.id for own in basis([turned], [commutes])] == ["turned"]
