"""Rewrites that pay only together, and what is known of the e-graphs that they are found in."""

from dataclasses import replace

import pytest

from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.rewrite.bodies import Body
from parloom.rewrite.rewrites import derived
from parloom.rewrite.substitutions import applied, directions, substitutions
from parloom.rewrite.take import with_takes as with_takes_of
from parloom.rewrite.terms import Name, Term
from parloom.search.may_pay import Values
from parloom.search.one_device import FunctionCosts, OneDevice
from parloom.search.pinned import resolve
from parloom.search.pins import parse_pin
from parloom.search.rewritten import with_takes
from tests.unit.graphs import graph, node
from tests.unit.test_fixed_form import NARROW, WIDE, ops, request_of


def factored(batch: int = 8192) -> Graph:
    """Two narrow products of a wide one, which is gone where both are products of weights."""
    wide, narrow = (batch, WIDE), (batch, NARROW)
    return graph(
        {"first": (WIDE, WIDE), "gate": (NARROW, WIDE), "up": (NARROW, WIDE)},
        {"x": (wide, "float32")},
        node("linear", "x", "first", to="a", shape=wide, path="first"),
        node("linear", "a", "gate", to="g", shape=narrow, path="gate"),
        node("linear", "a", "up", to="u", shape=narrow, path="up"),
        node("mul", "g", "u", to="m", shape=narrow, path="down"),
        node("sum", "m", to="loss", shape=()),
    )


def test_rewrites_that_pay_only_together_are_found() -> None:
    """Each alone costs more than the model, and all of them less than any single one."""
    made = factored()
    asked = request_of(made)
    takes = with_takes(asked).takes
    assert {name for take in takes for _, name in take.taken} == {"g", "u"}
    assert not ops(derived(made, list(map(str, takes)))).count("linear")
    costs = FunctionCosts(OneDevice(asked), made.main.name)
    every = substitutions(made, made.main, directions(made.main))
    single = {found.takes: applied(made, made.main, found) for found in every}
    alone = [
        costs.of(body)
        for (take, *_), body in single.items()
        if body and take.rules == ("linear_matmul_613d19",)
    ]
    assert len(alone) == 2
    assert min(alone) > costs.of(made.main)
    assert costs.of(with_takes_of(made, takes).main) * 1.1 < min(
        costs.of(body) for body in single.values() if body
    )


@pytest.mark.parametrize("op", ["matmul", "mm"])
def test_a_product_of_weights_as_large_as_before_is_a_step_on_the_way(op: str) -> None:
    """The weight is a product of two small ones, whose gradient is larger than theirs: the rules
    that lead to two products first say it otherwise.
    """
    rows, wide = (512, 4, 256), (512, 4, 2048)
    made = graph(
        {"low": (256, 64), "high": (64, 2048)},
        {"x": (rows, "float32")},
        node(op, "low", "high", to="w", shape=(256, 2048)),
        node("t", "w", to="wt", shape=(2048, 256)),
        node("linear", "x", "wt", to="y", shape=wide),
        node("sum", "y", to="loss", shape=()),
    )
    takes = with_takes(request_of(made)).takes
    found = derived(made, list(map(str, takes)))
    shapes = {v.spec.shape for item in found.main.body for v in item.results}
    assert (512, 4, 64) in shapes
    assert (256, 2048) not in shapes


@pytest.mark.parametrize("forbidden", ["rewrite=linear_matmul_613d19", "rewrite=merge_linear"])
def test_pins_forbid_rules_of_forms(forbidden: str) -> None:
    made = factored()
    pins = resolve([parse_pin(forbidden, forbidden=True)], made, factorize(made))
    takes = with_takes(replace(request_of(made), pinned=pins)).takes
    assert takes
    assert forbidden.removeprefix("rewrite=") not in {own for take in takes for own in take.rules}


@pytest.mark.parametrize(("devices", "expected"), [(1, 4), (64, 1)])
def test_what_saves_launches_is_a_choice_where_a_share_is_small(
    devices: int, expected: int
) -> None:
    """One device computes so long that launches are nothing; one of 64 does not."""
    rows, narrow = 64 * 4096, 512
    made = graph(
        {f"w{at}": (narrow, narrow) for at in range(4)},
        {f"x{at}": ((rows, narrow), "float32") for at in range(4)},
        *(node("linear", f"x{at}", f"w{at}", to=f"a{at}", shape=(rows, narrow)) for at in range(4)),
        *(node("relu", f"a{at}", to=f"r{at}", shape=(rows, narrow)) for at in range(4)),
        node("cat", ("r0", "r1", "r2", "r3"), -1, to="y", shape=(rows, 4 * narrow)),
        node("sum", "y", to="loss", shape=()),
    )
    takes = with_takes(request_of(made, f"{devices}xV100")).takes
    assert ops(derived(made, list(map(str, takes)))).count("relu") == expected


def test_the_class_of_an_input_is_known_whatever_it_is_united_with() -> None:
    """Here with one that is not of a value, and that has more calls."""
    made = factored()
    body = Body(made.main, 100)
    values = Values(body, [FunctionCosts(OneDevice(request_of(made)), "main")], {"first"})
    before = values.made(body.class_of("x"))
    twice = Term("add", (Name("x"), Name("x")))
    half = body.graph.add(Term("mul", (twice, 0.5)), body.classes, {})
    assert body.graph.unite(half, body.class_of("x"))
    body.graph.rebuild()
    assert body.class_of("x") == half
    assert values.made(half) == before
