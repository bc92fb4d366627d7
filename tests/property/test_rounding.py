"""Errors of rules in 16 bits: refused and allowed ones, and the kernels of torch beside them."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from parloom.errors import InputError
from parloom.ir.graph import Graph
from parloom.ir.ops.exact import Given
from parloom.ir.text import parse_graph
from parloom.rewrite import known, merge
from parloom.rewrite.follows import inexact, rules_for, with_few_rules
from parloom.rewrite.known import Known, cases, known_rules
from parloom.rewrite.parallel import computes_of
from parloom.rewrite.recorded import Recorded, gradients, same
from parloom.rewrite.rewrites import derived, rewritten
from parloom.rewrite.rounding import FUNCTIONS, NARROW, ROWS, errors, may_round
from parloom.rewrite.rules import Rule, only_moves, prove, rule
from parloom.rewrite.substitutions import by_rules, directions
from parloom.rewrite.take import parse_take

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BOTH = frozenset(NARROW)
# Rules that are true, and the dtypes in which they may be applied.
NARROWLY = {
    "sum of products": ("x[*, k], y[*, k], w[n, k]", "add(linear(x, w), linear(y, w))",
                        "linear(add(x, y), w)", BOTH),
    "parts of a product": ("x[*, k], y[*, j], w[n, k], v[n, j]",
                           "add(linear(x, w), linear(y, v))",
                           "linear(cat((x, y), -1), cat((w, v), -1))", BOTH),
    "low rank": ("x[*, k], a[r, k], b[n, r]", "linear(linear(x, a), b)",
                 "linear(x, mm(b, a))", BOTH),
    "scale": ("x[*, k], w[n, k]", "mul(linear(x, w), 0.3)", "linear(mul(x, 0.3), w)", BOTH),
    "it only moves": ("x[*, k], y[*, k]", "relu(cat((x, y), -1))",
                      "cat((relu(x), relu(y)), -1)", BOTH),
    # What is added and taken away again leaves its rounding.
    "there and back": ("x[*, k], y[*, k]", "x", "sub(add(x, y), y)", frozenset()),
    "a large one between": ("x[*, k], y[*, k], z[*, k]", "add(x, y)",
                            "sub(add(add(x, mul(z, 100.0)), y), mul(z, 100.0))", frozenset()),
    # 1e5 times a number of one is too large for float16, 1e-7 of one too small.
    "scale to be too large": ("x[*, k], y[k]", "mul(mul(x, 1e-5), mul(y, 1e5))",
                              "mul(mul(x, 1e5), mul(y, 1e-5))", frozenset({"bfloat16"})),
    "scale of another operand": ("x[*, k], w[n, k]", "mul(linear(x, w), 1e-7)",
                                 "linear(mul(x, 1e-7), mul(w, 1.0))", frozenset({"bfloat16"})),
    "sums of sums": ("x[*, k, j]", "mean(mean(x, (-1,)), (-1,))",
                     "mean(mean(x, (-2,)), (-1,))", BOTH),
    "a factor of many": ("x[*, k]", "mul(mul(x, 300.0), 0.01)", "mul(mul(x, 3e6), 1e-6)",
                         frozenset({"bfloat16"})),
}  # fmt: skip


def made(name: str) -> Rule:
    inputs, left, right, _ = NARROWLY[name]
    return rule(name, inputs, [left], [right])


@pytest.fixture(scope="module")
def checked() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    yield import_module("rules_checked")
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("name", NARROWLY)
def test_a_rule_is_of_the_dtypes_in_which_it_makes_no_larger_errors(name: str) -> None:
    assert prove(made(name)) == ""
    assert {d for d in NARROW if may_round(made(name), d)} == NARROWLY[name][3]


@pytest.mark.parametrize("name", NARROWLY)
def test_kernels_of_torch_say_the_same(name: str, checked: ModuleType) -> None:
    for dtype in NARROW:
        found = list(checked.errors_of_kernels(made(name), dtype))
        larger = any(times > 2 for own in found for times in own.times)
        assert larger == (dtype not in NARROWLY[name][3]) or only_moves(made(name))


@pytest.mark.slow
def test_errors_are_those_of_kernels(checked: ModuleType) -> None:
    """Of each side by itself, shape by shape."""
    rules = [own.rule for own in known_rules().values() if not only_moves(own.rule)]
    for found in Random(0).sample(rules, 3):
        for dtype in NARROW:
            pairs = zip(errors(found, dtype), checked.errors_of_kernels(found, dtype), strict=True)
            for own, kernels in pairs:
                assert own.left == pytest.approx(kernels.left, rel=1, abs=1e-5), found.id
                assert own.right == pytest.approx(kernels.right, rel=1, abs=1e-5), found.id
        assert list(checked.differences_in_16_bits(found)) == []


CALLS: dict[str, tuple[str, list[tuple[int, ...]], tuple[Any, ...]]] = {
    "linear": ("linear", [(4, 3), (5, 3), (5,)], ()),
    "a broadcast": ("add", [(4, 3), (3,)], ()),
    "a product of rows": ("mul", [(4, 3), (1, 3)], ()),
    "batches": ("matmul", [(2, 4, 3), (3, 5)], ()),
    "mean": ("mean", [(4, 3)], ((-2,),)),
    "softmax": ("softmax", [(4, 3)], (-2,)),
    "gelu": ("gelu", [(4, 3)], ()),
    "silu": ("silu", [(4, 3)], ()),
    "parts": ("split_with_sizes", [(4, 5)], ((2, 3), -1)),
    "transposed": ("transpose", [(4, 5)], (0, 1)),
    "convolution": ("conv1d", [(2, 4, 9), (6, 2, 3), (6,)], ((2,), (1,), (1,), 2)),
    "an image": ("conv2d", [(2, 3, 5, 4), (4, 3, 3, 1), (4,)], ((1, 1), (1, 0))),
    "means of windows": ("avg_pool1d", [(2, 3, 8)], ((2,),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_recorded_calls_and_their_gradients_are_those_of_torch(name: str) -> None:
    op, shapes, others = CALLS[name]
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape) for shape in shapes]
    algebra = Recorded(FUNCTIONS, ROWS)
    inputs, computes = [algebra.given(own, same) for own in given], computes_of(op)
    assert computes is not None
    found = computes(algebra, Given((*inputs, *others)))
    upstream = [rng.standard_normal(own.value.shape) for own in found]
    slopes = gradients(algebra.tape, found, upstream)
    leaves = [torch.tensor(own, requires_grad=True) for own in given]
    sides = getattr(torch.ops.aten, op)(*leaves, *others)
    outputs = [sides] if isinstance(sides, torch.Tensor) else list(sides)
    expected = torch.autograd.grad(outputs, leaves, list(map(torch.tensor, upstream)))
    close = 2e-3 if op == "gelu" else 1e-8  # its approximation by a hyperbolic tangent
    for own, out in zip(found, outputs, strict=True):
        assert own.value == pytest.approx(out.detach().numpy(), rel=close, abs=close)
    for own, slope in zip(inputs, expected, strict=True):
        assert slopes[own] == pytest.approx(slope.numpy(), rel=close, abs=close)


def test_recorded_batch_norms_are_those_of_torch() -> None:
    """Torch has no gradients of the statistics."""
    rng = np.random.default_rng(0)
    given = [rng.random(shape) + 0.5 for shape in ((4, 3, 5), *[(3,)] * 4)]
    algebra, computes = Recorded(FUNCTIONS, ROWS), computes_of("batch_norm")
    assert computes is not None
    inputs = [algebra.given(own, same) for own in given]
    (found,) = computes(algebra, Given((*inputs, False, 0.1, 1e-5)))
    upstream = rng.standard_normal(found.value.shape)
    slopes = gradients(algebra.tape, [found], [upstream])
    leaves = [torch.tensor(own, requires_grad=at < 3) for at, own in enumerate(given)]
    expected = torch.ops.aten.batch_norm(*leaves, False, 0.1, 1e-5, False)
    assert found.value == pytest.approx(expected.detach().numpy(), rel=1e-9)
    pairs = zip(
        inputs[:3], torch.autograd.grad(expected, leaves[:3], torch.tensor(upstream)), strict=True
    )
    for own, slope in pairs:
        assert slopes[own] == pytest.approx(slope.numpy(), rel=1e-8, abs=1e-8)


def test_numbers_round_as_those_of_torch() -> None:
    """Of float32, to which torch rounds first."""
    drawn = np.random.default_rng(0).standard_normal(10_000) * 10.0 ** np.arange(-6, 4).repeat(1000)
    drawn = drawn.astype(np.float32).astype(np.float64)
    exact = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65519.0, 2.0**-25, -0.0, np.inf])
    for numbers in (drawn, exact):
        for dtype, rounded in NARROW.items():
            expected = torch.tensor(numbers).to(getattr(torch, dtype)).double().numpy()
            assert (rounded(numbers) == expected).all()


def test_functions_that_nobody_wrote_in_numbers_are_not_measured() -> None:
    own = rule("own", "x[*, k], y[*, k]", ["add(elu(x), add(y, y))"], ["add(add(y, elu(x)), y)"])
    assert prove(own) == ""
    assert not only_moves(own)
    assert not any(may_round(own, dtype) for dtype in NARROW)


@pytest.mark.parametrize("biased", [False, True])
def test_merges_only_move(biased: bool) -> None:
    """They need no measure: each result is the same sum of the same products."""
    assert only_moves(merge.rule_of("linear", (), (), biased))
    assert only_moves(merge.rule_of("conv2d", (1, 3), ((1, 1), (0, 1)), biased))
    assert only_moves(merge.rule_of("conv2d", (11, 11), ((4, 4), (2, 2)), biased))
    assert only_moves(merge.rule_of("conv2d", (16, 16), ((16, 16),), biased))


def sums(dtype: str, factor: float = 0.5) -> Graph:
    """Two products that are added up, and one that is scaled."""
    lines = [
        'graph "Sums" training=True', "",
        *(f'input {n}: {dtype}[8, 6] = batch("{n}")' for n in "xy"),
        f'input w: {dtype}[4, 6] = parameter("w", trainable=True)', "", "main main:",
        f"    a: {dtype}[8, 4] = linear(x, w)  # a",
        f"    b: {dtype}[8, 4] = linear(y, w)  # b",
        f"    s: {dtype}[8, 4] = add(a, b)  # s",
        f"    d: {dtype}[4, 6] = mul(w, {factor})  # d",
        f"    c: {dtype}[8, 4] = linear(x, d)  # c",
        f"    e: {dtype}[8, 4] = add(s, c)  # e",
        f"    loss: {dtype}[] = mean(e)  #", "    return loss", "", "loss loss", "",
    ]  # fmt: skip
    return parse_graph("\n".join(lines))


@pytest.mark.parametrize("dtype", NARROW)
def test_ways_by_rules_that_reassociate_are_found_in_16_bits(dtype: str) -> None:
    graph = sums(dtype)
    every = by_rules(graph, graph.main, directions(graph.main))
    ways = [own for found in every for own in found.takes if own.values == ("s",)]
    take = with_few_rules(graph.main, next(own for own in ways if own.call.op == "linear"))
    assert take is not None
    derived(graph, [str(take)])


def test_a_rule_that_the_file_says_more_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is proved, but rounds otherwise."""
    wrong = rule(
        "wrong", "x[*, k], w[n, k]",
        ["linear(x, w)"], ["sub(add(linear(x, w), exp(linear(x, w))), exp(linear(x, w)))"],
    )  # fmt: skip
    assert prove(wrong) == ""
    monkeypatch.setattr(known, "known_rules", lambda: {"wrong": Known(wrong, BOTH)})
    text = f"take a in main by wrong: {wrong.right[0]}"
    take = parse_take(text)
    assert take is not None
    for dtype in ("float32", *NARROW):
        graph = sums(dtype)
        assert rules_for(graph.main) == [wrong]
        assert rewritten(graph, [text])
        if dtype == "float32":
            assert with_few_rules(graph.main, take) == take
            derived(graph, [text])
            continue
        assert with_few_rules(graph.main, take) is None
        with pytest.raises(InputError, match=f"twice as large by wrong in {dtype}"):
            derived(graph, [text])


def test_a_case_is_measured_with_its_own_number() -> None:
    """The rule, that a factor moves from one side of a product to the other, is of one half."""
    for factor, said in ((0.25, ""), (1e-7, "cat_mul_608b18_1em07 in float16")):
        graph = sums("float16", factor)
        (found,) = (
            own
            for own in cases(graph.main)
            if own.rule.id.startswith("cat_mul_608b18_") and str(factor) in str(own.rule.left[0])
        )
        assert found.narrow == BOTH
        assert inexact(graph.main, [found.rule]) == said


def test_all_rules_of_the_file_say_what_is_measured() -> None:
    for own in Random(1).sample(list(known_rules().values()), 25):
        assert own.narrow == {d for d in NARROW if may_round(own.rule, d)}, own.rule.id


@pytest.mark.parametrize("number", [2, 8])
def test_products_as_one_are_no_less_exact(number: int) -> None:
    """Merges are not measured where they are made: gradients of what they share are one sum."""
    names = [f"w{at}" for at in range(number)]
    inputs = ", ".join(["x[b, k]", *(f"{own}[n{at}, k]" for at, own in enumerate(names))])
    apart = [f"linear(x, {own}, None)" for own in names]
    joined = [f"parloom.linears(x, ({', '.join(names)}), None)[{at}]" for at in range(number)]
    found = list(errors(rule("merged", inputs, apart, joined), "bfloat16"))
    pairs = [pair for own in found for pair in zip(own.left, own.right, strict=True)]
    assert all(one <= other * (1 + 1e-9) for other, one in pairs)
    # In the other direction the difference would be seen.
    assert any(other > one * 1.2 for other, one in pairs)
