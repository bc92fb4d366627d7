"""Parallel operators moved through others: from factors, proved at any degree, checked at two."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from parloom.errors import InputError
from parloom.rewrite.generation.basis import follows
from parloom.rewrite.generation.factor_rules import (
    DEGREE,
    candidates,
    exchanged,
    inverse_rules,
    joined_rules,
    operation,
    parallel_rules,
    slots,
)
from parloom.rewrite.modular import PRIME, Numbers
from parloom.rewrite.rules import Rule, counterexample, prove, rule
from parloom.rewrite.terms import evaluate, size_in

OPERATIONS = {
    "linear": ("x[b, c], w[n, c]", "linear(x, w)"),
    "relu": ("x[a, b, c]", "relu(x)"),
    "add": ("x[a, b, c], y[a, b, c]", "add(x, y)"),
    "mul": ("x[a, b, c], y[a, b, c]", "mul(x, y)"),
    "cat": ("x[a, p, c], y[a, q, c]", "cat((x, y), -2)"),
    "split": ("x[a, p + q, c]", "split_with_sizes(x, (p, q), -2)"),
    "softmax": ("x[a, b, c]", "softmax(x, -1)"),
}
X, W = "x[1, 1, 1, 1, degree * b, degree * c]", "w[1, 1, 1, 1, degree * n, degree * c]"
# Parallel rules of a linear layer with one thing wrong.
WRONG = {
    "another dim": ("parallel.linear(partition(x, 1, degree), replicate(w, 0, degree))",
                    "partition(parallel.linear(x, w), 2, degree)"),
    "no sum of partial sums": ("parallel.linear(partition(x, 2, degree), partition(w, 2, degree))",
                               "parallel.linear(x, w)"),
    "a sum in another dim": (
        "reduce(parallel.linear(partition(x, 2, degree), partition(w, 2, degree)), 1, degree)",
        "parallel.linear(x, w)"),
    "no copies": ("parallel.linear(partition(x, 1, degree), w)",
                  "partition(parallel.linear(x, w), 1, degree)"),
    "copies in another dim": ("parallel.linear(partition(x, 1, degree), replicate(w, 1, degree))",
                              "partition(parallel.linear(x, w), 1, degree)"),
    "a sum through a function": ("relu(reduce(x, 1, degree))", "reduce(relu(x), 1, degree)"),
    "a sum of each operand": ("mul(reduce(x, 1, degree), reduce(x, 1, degree))",
                              "reduce(mul(x, x), 1, degree)"),
    "a sum of copies is one": ("reduce(replicate(x, 1, degree), 1, degree)", "x"),
    "pieces in another order": ("combine(replicate(x, 1, degree), 1, degree)", "x"),
    "parts are not copies": ("partition(x, 1, degree)", "replicate(x, 1, degree)"),
}  # fmt: skip


def at_degree(found: Rule, degree: int, seed: int) -> bool:
    """Whether both sides agree modulo a prime, extents all different but for the degree."""
    numbers, extents = np.random.default_rng(seed), iter((5, 4, 7, 3, 2, 6, 8, 9, 10, 11))
    sizes = {DEGREE: degree, **{n: next(extents) for n in found.extents if n != DEGREE}}
    # Devices are few, so that arrays stay small.
    sizes |= {n: 1 + seed % 2 for n in sizes if n.startswith("e_") or n in ("d0", "d1", "d2")}
    inputs = {}
    for own in found.inputs:
        shape = [size_in(s, sizes, 1) for s in own.sizes if not isinstance(s, str)]
        inputs[own.name] = numbers.integers(0, PRIME, shape)
    sides = [evaluate(side, Numbers(), inputs, sizes) for side in (found.left, found.right)]
    return all((one == other).all() for one, other in zip(*sides, strict=True))


def every() -> Iterator[Rule]:
    for own in OPERATIONS.values():
        yield from parallel_rules(operation(*own))
    yield from inverse_rules(3)
    yield from exchanged(3)


def test_factors_say_where_devices_meet() -> None:
    found = slots(operation(*OPERATIONS["linear"]))
    assert found.operands == (("n", "d0", "k"), ("d0", "n", "k"))
    assert found.results == (("k", "d0", "n"),)
    with pytest.raises(InputError, match="do not lack one factor each"):
        slots(operation("x[b, s, k], w[n, k]", "linear(x, w)"))


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_factors_say_is_proved_at_any_degree(name: str) -> None:
    """But for sums, which not every operator passes on."""
    own = operation(*OPERATIONS[name])
    found, proved = list(candidates(own)), parallel_rules(own)
    refused = [rule.id for rule in found if rule not in proved]
    assert all(one.startswith("reduce ") for one in refused)
    kinds = {rule.id.split()[0] for rule in proved}
    sums = name not in ("relu", "softmax")
    assert kinds == {"partition", "combine", "replicate", "cat", *(["reduce"] if sums else [])}
    # Each factor that can be split, in parts and in copies.
    assert sum(rule.id.startswith("partition ") for rule in proved) == len(slots(own).plain)


def test_parallel_rules_hold_at_degrees_two_and_three() -> None:
    rules = list(every())
    assert len(rules) > 200
    for found, degree in product(rules, (2, 3)):
        assert prove(found) == "", found.id
        assert at_degree(found, degree, degree), f"{found.id} at degree {degree}"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parallel_rules_are_refused(name: str) -> None:
    found = rule(name, f"{X}, {W}", *([side] for side in WRONG[name]))
    assert prove(found)
    assert counterexample(found, 0)


def test_longer_rules_follow_from_those_of_factors() -> None:
    """Two rules of Unity's of three calls, and one that no rules make true."""
    known = list(every())
    x, w = "x[1, 1, 1, 1, degree * b, c]", "w[1, 1, 1, 1, n, c]"
    linear = "parallel.linear(partition(x, 1, degree), replicate(w, 0, degree))"
    true = {
        f"relu({linear})": "partition(relu(parallel.linear(x, w)), 1, degree)",
        f"combine({linear}, 1, degree)": "parallel.linear(x, w)",
        "parallel.linear(combine(replicate(x, 1, degree), 1, degree), w)":
        "combine(replicate(parallel.linear(x, w), 1, degree), 1, degree)",
    }  # fmt: skip
    for left, right in true.items():
        assert follows(rule("true", f"{x}, {w}", [left], [right]), known), left
    wrong = f"reduce({linear}, 1, degree)"
    assert not follows(rule("wrong", f"{x}, {w}", [wrong], ["parallel.linear(x, w)"]), known)


JOINED = {
    "mm": ("x[m, k], y[k, n]", "mm(x, y)", 5),
    "conv2d": ("x[b, c, h, v], w[o, c, 1 + 1 + 1, 1 + 1 + 1]",
               "conv2d(x, w, None, (1, 1), (1, 1), (1, 1), 1)", 5),
    "relu": ("x[b, c, h, v]", "relu(x)", 4),
    "add": ("x[m, n], y[m, n]", "add(x, y)", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_what_factors_say_of_parts_and_sums_on_one_device(name: str) -> None:
    """Parts along each factor; sums of each operand that the operator is linear in."""
    inputs, call, count = JOINED[name]
    found = joined_rules(operation(inputs, call))
    assert len(found) == count
    assert not any(counterexample(own, seed) for own in found for seed in range(3))
