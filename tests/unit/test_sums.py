"""Where partial sums may be added, and where that is tried."""

import pytest

from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.text import parse_graph

ROWS = "float32[8, 8]"
BODIES = {
    "two products": "    t: {s} = add(a, b)  # t\n",
    "zero is added": "    z: {s} = add(a, 0)  # z\n    t: {s} = add(z, b)  # t\n",
    "what is between is scaled": "    z: {s} = mul(b, 2.0)  # z\n    t: {s} = sub(a, z)  # t\n",
    "one product": "    t: {s} = add(a, h)  # t\n",
    "a number is added": "    z: {s} = add(b, 1.0)  # z\n    t: {s} = add(a, z)  # t\n",
    "no linear operator is between": "    z: {s} = relu(b)  # z\n    t: {s} = add(a, z)  # t\n",
    "a product is read twice": "    z: {s} = add(a, b)  # z\n    t: {s} = mul(z, b)  # t\n",
    "with an input of the graph": "    z: {s} = add(a, x)  # z\n    t: {s} = add(z, h)  # t\n",
}
TRIED = {
    "two products": {"t"},
    "zero is added": {"z", "t"},
    "what is between is scaled": {"z", "t"},
}


def graph(body: str) -> Graph:
    lines = body.format(s=ROWS)
    return parse_graph(f"""\
graph "Sums" training=True

input w0: {ROWS} = parameter("w0", trainable=True)
input w1: {ROWS} = parameter("w1", trainable=True)
input x: {ROWS} = batch("x")

main main:
    h: {ROWS} = tanh(x)
    a: {ROWS} = linear(h, w0)  # m0
    b: {ROWS} = linear(h, w1)  # m1
{lines}    u: {ROWS} = relu(t)
    loss: float32[] = sum(u)
    return loss

loss loss
""")


@pytest.mark.parametrize("name", BODIES)
def test_additions_of_several_sums_and_what_is_between_are_tried(name: str) -> None:
    made = graph(BODIES[name])
    rules = factorize(made).rules
    nodes = {node.results[0].name: rules[made.main.name, node.key] for _, node in made.unfolded()}
    assert {value for value, rule in nodes.items() if rule.adds} == TRIED.get(name, set())
    assert all(rule.linear for rule in nodes.values() if rule.adds)
    assert not any(nodes[value].linear for value in ("u", "a", "b"))
