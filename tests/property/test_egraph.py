"""E-graphs: what is united is equal, and what is equal by rules is united."""

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import pytest

from parloom.ir.ops import OPS
from parloom.ir.ops.exact import Given
from parloom.rewrite.egraph import Class, EGraph
from parloom.rewrite.modular import PRIME, Ints, Numbers
from parloom.rewrite.rules import Rule, rule
from parloom.rewrite.symbolic import NotExpressed, dim
from parloom.rewrite.terms import Extent, Name, Term, parse_inputs, parse_term, size_in
from tests.unit.test_rules import FALSE, TRUE, made

RULES = [made(name, TRUE[name]) for name in TRUE]
EXTENTS = {"b": 2, "s": 3, "k": 5, "n": 7, "m": 4}
INPUTS = parse_inputs("x[b, k], y[b, k], w[n, k], v[m, k], u[n, k], z[b, n]")
SIZES = {name: dim(name) for name in EXTENTS}


def graph_of(inputs: str = "") -> tuple[EGraph, dict[str, Class]]:
    """A graph with inputs alone, those of all tests where none are told."""
    graph = EGraph()
    found = {}
    for own in parse_inputs(inputs) if inputs else INPUTS:
        shape = [size_in(size, SIZES, ((),)) for size in own.sizes if not isinstance(size, str)]
        found[own.name] = graph.input(own.name, tuple(shape))
    return graph, found


def drawn(rng: Random, depth: int) -> Term | Name:
    """A term over the inputs, legal or not."""
    if depth == 0 or rng.random() < 0.2:
        return Name(rng.choice(INPUTS).name)
    one, other = drawn(rng, depth - 1), drawn(rng, depth - 1)
    n, m = Extent((("n",),)), Extent((("m",),))
    return rng.choice((
        Term("linear", (one, other)),
        Term("add", (one, other)),
        Term("gelu", (one,)),
        Term("neg", (one,)),
        Term("mul", (one, 0.5)),
        Term("cat", ((one, other), -1)),
        Term("cat", ((one, other), 0)),
        Term("split_with_sizes", (one, (n, m), -1), rng.randrange(2)),
        Term("softmax", (one, -1)),
    ))  # fmt: skip


def values(graph: EGraph, inputs: Mapping[str, Class]) -> dict[Class, list[Ints]]:
    """What each call of a class is in numbers, as far as its operands are known."""
    rng = np.random.default_rng(0)
    known: dict[Class, Ints] = {}
    for one in map(graph.find, inputs.values()):
        known[one] = rng.integers(0, PRIME, [size_of(own) for own in graph.shapes[one.number]])
    found: dict[Class, list[Ints]] = {}
    done: set[Any] = set()
    while True:
        before = len(done)
        for key, owner in graph.nodes():
            if key not in done and all(child in known for child in children(key[1])):
                computes = OPS[key[0]].computes
                assert computes is not None
                value = computes(Numbers(), Given(numbers(key[1], known)))[key[2]]
                known.setdefault(owner, value)
                found.setdefault(owner, [known[owner]]).append(value)
                done.add(key)
        if len(done) == before:
            assert len(done) == graph.num_nodes
            return found


def size_of(own: Any) -> int:
    return sum(int(np.prod([EXTENTS[e] for e in block])) for block in own)


def children(args: Any) -> list[Class]:
    if isinstance(args, Class):
        return [args]
    return [c for arg in args for c in children(arg)] if isinstance(args, tuple) else []


def numbers(args: Any, known: Mapping[Class, Ints]) -> Any:
    if isinstance(args, Class):
        return known[args]
    if isinstance(args, tuple) and args and all(_is_block(own) for own in args):
        return size_of(args)
    return tuple(numbers(arg, known) for arg in args) if isinstance(args, tuple) else args


def _is_block(own: Any) -> bool:
    return isinstance(own, tuple) and all(isinstance(extent, str) for extent in own)


@pytest.mark.parametrize("seed", range(25))
def test_calls_of_a_class_compute_the_same(seed: int) -> None:
    rng = Random(seed)
    graph, inputs = graph_of()
    added = 0
    while added < 4:
        try:
            graph.add(drawn(rng, 3), inputs, SIZES)
            added += 1
        except NotExpressed:
            continue
    graph.saturate(RULES, 3)
    for same in values(graph, inputs).values():
        assert all((one == same[0]).all() for one in same)


def test_a_wrong_rule_would_be_seen() -> None:
    """The control of the test above."""
    graph, inputs = graph_of()
    graph.add(parse_term("gelu(mul(x, 2))", INPUTS), inputs, SIZES)
    graph.saturate([made("a scale before a function", FALSE["a scale before a function"])], 1)
    differ = [
        same for same in values(graph, inputs).values() if any((o != same[0]).any() for o in same)
    ]
    assert len(differ) == 1


def derives(inputs: str, left: str, right: str, rules: list[Rule]) -> bool:
    declared = parse_inputs(inputs)
    graph, bound = graph_of(inputs)
    one, other = (graph.add(parse_term(t, declared), bound, SIZES) for t in (left, right))
    assert graph.find(one) != graph.find(other)
    graph.saturate(rules, 4)
    return graph.find(one) == graph.find(other)


@pytest.mark.parametrize(
    ("inputs", "left", "right"),
    [
        (
            "x[b, k], y[b, k], z[b, k], w[n, k]",
            "linear(add(x, add(y, z)), w)",
            "add(linear(x, w), add(linear(y, w), linear(z, w)))",
        ),
        (
            "x[b, s, k], w[n, k], v[m, k]",
            "gelu(linear(x, w))",
            "gelu(split_with_sizes(linear(x, cat((w, v), 0)), (n, m), -1)[0])",
        ),
        (
            "x[b, k], a[s, k], c[n, s], d[m, n]",
            "linear(linear(linear(x, a), c), d)",
            "linear(x, mm(mm(d, c), a))",
        ),
    ],
)
def test_what_follows_from_rules_is_found(inputs: str, left: str, right: str) -> None:
    assert derives(inputs, left, right, RULES)
    assert not derives(inputs, left, right, RULES[-2:])


def test_shapes_are_conditions() -> None:
    """A rule of matrices of one size says nothing of others."""
    square = rule("squares", "x[n, n], y[n, n]", ["mm(x, y)"], ["mm(y, x)"])
    assert derives("x[n, n], y[n, n]", "mm(x, y)", "mm(y, x)", [square])
    assert not derives("x[n, n], y[n, n]", "mm(x, y)", "neg(mm(x, y))", [square])
    graph, inputs = graph_of("x[b, k], y[k, n]")
    graph.add(parse_term("mm(x, y)", parse_inputs("x[b, k], y[k, n]")), inputs, SIZES)
    assert graph.saturate([square], 3)
    assert graph.num_nodes == 1


def test_calls_of_equal_operands_become_equal() -> None:
    graph, inputs = graph_of()
    declared = INPUTS
    one, other = (
        graph.add(parse_term(text, declared), inputs, SIZES)
        for text in ("gelu(neg(neg(x)))", "gelu(x)")
    )
    (twice,) = [own for own in RULES if own.id == "minus minus"]
    assert graph.saturate([twice], 5)
    assert graph.find(one) == graph.find(other)
