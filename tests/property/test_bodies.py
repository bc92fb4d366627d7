"""Bodies of functions as e-graphs: whatever equals a value by rules computes the same."""

from random import Random
from typing import Any

import numpy as np
import pytest

from parloom.errors import InputError
from parloom.ir.graph import Function, Graph, Node, Ref
from parloom.ir.ops import OPS
from parloom.ir.ops.exact import Given
from parloom.ir.text import parse_graph
from parloom.ir.verify import verify_graph
from parloom.rewrite.bodies import Body
from parloom.rewrite.egraph import Class, ways
from parloom.rewrite.modular import PRIME, Ints, Numbers
from parloom.rewrite.rules import Rule, rule, with_lead
from parloom.rewrite.substitutions import by_rules
from parloom.rewrite.take import NONE, Take, parse_take, with_takes

RULES = [
    rule(f"rule_{number}", inputs, [left], [right])
    for number, (inputs, left, right) in enumerate((
        ("x[b, k], y[b, k], w[n, k]", "linear(add(x, y), w)", "add(linear(x, w), linear(y, w))"),
        ("x[b, k], w[n, k], v[m, k]", "cat((linear(x, w), linear(x, v)), -1)",
         "linear(x, cat((w, v), -2))"),
        ("x[b, k], y[b, m], w[n, k], v[n, m]", "linear(cat((x, y), -1), cat((w, v), -1))",
         "add(linear(x, w), linear(y, v))"),
        ("x[b, k], y[b, k]", "relu(cat((x, y), -1))", "cat((relu(x), relu(y)), -1)"),
        ("x[b, k], y[b, m]", "split_with_sizes(cat((x, y), -1), (k, m), -1)[0]", "x"),
        ("x[b, k]", "mul(add(x, x), 0.5)", "x"),
        ("x[b, k], y[b, k]", "add(x, y)", "add(y, x)"),
    ))
]  # fmt: skip
LED: list[Rule] = [with_lead(own) or own for own in RULES]


def random_graph(rng: Random) -> Graph:
    """Products, sums, joints and functions of values made before, with dims in front."""
    lead = rng.choice(("4, ", "2, 3, "))
    widths, body = {"x": 6, "y": 6}, list[str]()
    weights: dict[str, tuple[int, int]] = {}
    rank = lead.count(",") + 1
    for index in range(8):
        one = rng.choice(list(widths))
        alike = [name for name, width in widths.items() if width == widths[one]]
        other, width = rng.choice(alike), widths[one]
        kind = rng.choice(("linear", "linear", "add", "cat", "relu", "mul"))
        if kind == "linear":
            rows, known = rng.choice((4, 6)), [n for n, s in weights.items() if s[1] == width]
            name = rng.choice(known) if known and rng.random() < 0.5 else f"w{index}"
            rows, _ = weights.setdefault(name, (rows, width))
            call, made = f"linear({one}, {name})", rows
        elif kind == "add":
            call, made = f"add({one}, {other})", width
        elif kind == "cat":
            dim = rng.choice((-1, rank - 1))
            call, made = f"cat(({one}, {other}), {dim})", 2 * width
        elif kind == "relu":
            call, made = f"relu({one})", width
        else:
            call, made = f"mul({one}, 0.5)", width
        widths[f"v{index}"] = made
        body.append(f"    v{index}: float32[{lead}{made}] = {call}  # m{index}")
    text = [
        'graph "Body" training=True',
        "",
        *(f'input {name}: float32[{lead}6] = batch("{name}")' for name in "xy"),
        *(
            f'input {name}: float32[{rows}, {width}] = parameter("{name}", trainable=True)'
            for name, (rows, width) in weights.items()
        ),
        "",
        "main main:",
        *body,
        "    loss: float32[] = sum(v7)  #",
        "    return loss",
        "",
        "loss loss",
        "",
    ]
    return parse_graph("\n".join(text).replace("  #\n", "\n"))


def check(body: Body) -> int:
    """Compare all calls of each class in numbers; how many there are."""
    rng, known = np.random.default_rng(0), dict[Class, Ints]()
    for value in body.function.inputs:
        known[body.class_of(value.name)] = rng.integers(0, PRIME, value.spec.shape)
    left = list(body.graph.nodes())
    while left:
        ready = [own for own in left if all(child in known for child in children(own[0][1]))]
        assert ready, "each class is made of inputs in some way"
        for key, owner in ready:
            computes = OPS[key[0]].computes
            assert computes is not None
            value = computes(Numbers(), Given(numbers(key[1], known)))[key[2]]
            assert value.shape == body.graph.shapes[owner.number]
            assert (known.setdefault(owner, value) == value).all(), key
        left = [own for own in left if own not in ready]
    return body.graph.num_nodes


def children(args: Any) -> list[Class]:
    if isinstance(args, Class):
        return [args]
    return [child for arg in args for child in children(arg)] if isinstance(args, tuple) else []


def numbers(args: Any, known: dict[Class, Ints]) -> Any:
    if isinstance(args, Class):
        return known[args]
    return tuple(numbers(arg, known) for arg in args) if isinstance(args, tuple) else args


@pytest.mark.parametrize("seed", range(30))
def test_what_equals_a_value_computes_the_same(seed: int) -> None:
    body = Body(random_graph(Random(seed)).main, 1_000)
    before = body.graph.num_nodes
    body.saturate(LED, 2)
    assert check(body) >= before


def computed(function: Function) -> dict[str, Ints]:
    """The values of a function modulo a prime."""
    rng = np.random.default_rng(1)
    known = {v.name: rng.integers(0, PRIME, v.spec.shape) for v in function.inputs}

    def given(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return known[arg.name]
        return tuple(map(given, arg)) if isinstance(arg, tuple) else arg

    for item in function.body:
        assert isinstance(item, Node)
        computes = OPS[item.op].computes
        assert computes is not None
        made = computes(Numbers(), Given(tuple(map(given, item.args))))
        known |= {value.name: one for value, one in zip(item.results, made, strict=True)}
    return known


def takes_in(graph: Graph) -> list[Take]:
    """What one rule at one place makes of main."""
    every = by_rules(graph, graph.main, [way for own in LED for way in ways(own)])
    return [take for found in every for take in found.takes]


@pytest.mark.parametrize("seed", range(30))
def test_a_graph_with_takes_computes_the_same(seed: int) -> None:
    graph = random_graph(Random(seed))
    takes, expected = takes_in(graph), computed(graph.main)["loss"]
    for take in takes:
        assert parse_take(str(take)) == take
        found = with_takes(graph, [take])
        verify_graph(found)
        assert (computed(found.main)["loss"] == expected).all()
    values = dict.fromkeys(v for take in takes for v in take.values if v != NONE)
    rng, several = Random(seed), []
    for value in values:
        several.append(rng.choice([take for take in takes if value in take.values]))
    try:
        found = with_takes(graph, several)
    except InputError:  # two are of one call
        return
    assert (computed(found.main)["loss"] == expected).all()


def test_something_is_found() -> None:
    found = [take for seed in range(30) for take in takes_in(random_graph(Random(seed)))]
    assert {take.call.op for take in found} >= {"linear", "cat", "add"}


def test_a_false_rule_would_be_seen() -> None:
    wrong = rule("wrong", "x[*]", ["relu(x)"], ["mul(x, 0.5)"])
    seen = 0
    for seed in range(10):
        body = Body(random_graph(Random(seed)).main, 1_000)
        body.saturate([wrong], 2)
        try:
            check(body)
        except AssertionError:
            seen += 1
    assert seen > 0
