"""Which values a program makes gradients of."""

from dataclasses import replace

from parloom.ir.gradients import with_gradients
from parloom.ir.text import parse_graph

TEXT = """graph "Two" training=True

input x: float32[4, 4] = batch("x")
input w: float32[4, 4] = parameter("w", trainable=True)
input v: float32[4, 4] = parameter("v", trainable=True)
input u: float32[4, 4] = parameter("u", trainable=True)
input t: float32[4, 4] = parameter("t", trainable=True)

def block(
    h: float32[4, 4],
    weight: float32[4, 4],
):
    made: float32[4, 4] = linear(h, weight)  # made
    return made

main main:
    first: float32[4, 4] = block["first"](x, w)
    second: float32[4, 4] = block["second"](first, v)
    other: float32[4, 4] = block["other"](x, u)
    apart: float32[4, 4] = detach(t)  # apart
    both: float32[4, 4] = add(second, apart)  # both
    loss: float32[] = sum(both)  #
    return loss

loss loss
"""


def test_gradients_go_through_calls_to_what_the_loss_depends_on() -> None:
    graph = parse_graph(TEXT)
    assert with_gradients(graph) & {*"wvut"} == {"w", "v"}


def test_of_a_stage_they_come_from_what_leaves_it() -> None:
    """A value that leaves may be the result of a call."""
    graph = replace(parse_graph(TEXT), loss=None)
    for leaving, found in (("first", {"w"}), ("second", {"w", "v"}), ("other", {"u"})):
        assert with_gradients(replace(graph, leaving=(leaving,))) & {*"wvut"} == found
