"""What TASO's pruning leaves out: rules that say no more than a rule of a part of their sides."""

import pytest

from parloom.rewrite.generation.basis import says_more
from parloom.rewrite.rules import rule

TENSORS = "x[b, k], y[b, k], w[n, k]"


@pytest.mark.parametrize(
    ("left", "right", "more"),
    [
        ("linear(add(x, y), w)", "add(linear(x, w), linear(y, w))", True),
        # A call that both sides have stands for any value.
        ("add(gelu(x), y)", "add(y, gelu(x))", False),
        # The last calls differ in one operand.
        ("gelu(add(x, y))", "gelu(add(y, x))", False),
    ],
)
def test_what_a_part_of_a_rule_says(left: str, right: str, more: bool) -> None:
    assert says_more(rule("own", TENSORS, [left], [right])) is more


def test_a_window_larger_than_its_image_makes_nothing_that_an_input_could_be() -> None:
    inputs = "x[b, c, 1], w[n, c, 1 + 1], y[b, n, p]"
    whole = rule("own", inputs, ["cat((conv1d(x, w), y), 2)"], ["cat((y, conv1d(x, w)), 2)"])
    assert says_more(whole)
