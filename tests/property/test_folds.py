"""Affine maps of channels moved into weights: proved, equal with gradients, and wrong ones."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parloom.errors import InputError
from parloom.execute.reference import evaluate
from parloom.ir.graph import Graph
from parloom.ir.text import parse_graph, print_graph
from parloom.ir.verify import verify_graph
from parloom.rewrite.bodies import Body
from parloom.rewrite.folds import NORM, SCALE, SHIFT, folds
from parloom.rewrite.follows import with_few_rules
from parloom.rewrite.horizontal import fusions
from parloom.rewrite.rewrites import derived
from parloom.rewrite.rounding import NARROW, may_round
from parloom.rewrite.rules import counterexample, prove, rule
from parloom.rewrite.substitutions import applied, by_rules, differences, directions
from parloom.rewrite.take import Take, parse_take
from parloom.search.may_pay import Values
from parloom.search.one_device import FunctionCosts, OneDevice
from parloom.search.worthwhile import weights_of
from tests.unit.test_fixed_form import request_of

Layer = tuple[str, str, str, str]
# The shapes of the input and of the weight, the call, and the shape of its result.
LAYERS: Mapping[str, Layer] = {
    "a product": ("4, 6", "5, 6", "linear(x, w)", "4, 5"),
    "a product with a bias": ("4, 6", "5, 6", "linear(x, w, c)", "4, 5"),
    "a row of places": ("4, 6, 9", "5, 6, 3", "conv1d(x, w, None, (2,), (1,))", "4, 5, 5"),
    "an image": ("4, 6, 7, 8", "5, 6, 3, 2", "conv2d(x, w)", "4, 5, 5, 7"),
    "an image with a bias": ("4, 6, 7, 8", "5, 6, 1, 3", "conv2d(x, w, c, (1, 1), (0, 1))",
                             "4, 5, 7, 8"),
    "groups": ("4, 6, 7, 8", "8, 3, 3, 3", "conv2d(x, w, c, (1, 1), (1, 1), (1, 1), 2)",
               "4, 8, 7, 8"),
    "a channel each": ("4, 6, 7, 8", "6, 1, 3, 3",
                       "conv2d(x, w, None, (1, 1), (1, 1), (1, 1), 6)", "4, 6, 7, 8"),
    "a volume": ("2, 3, 4, 5, 3", "4, 3, 1, 2, 1", "conv3d(x, w, None, (1, 2, 1))",
                 "2, 4, 4, 2, 3"),
    "places apart": ("4, 6, 9", "5, 6, 3", "conv1d(x, w, c, (1,), (0,), (2,))", "4, 5, 5"),
    "zeros by name": ("4, 6, 7, 8", "5, 6, 2, 3", 'conv2d(x, w, None, (1, 1), "same", (1, 2))',
                      "4, 5, 7, 8"),
}  # fmt: skip
NORMS = {
    "a norm": ("g, d, m, v", "False, 0.1, 1e-05"),
    "a norm with another eps": ("g, d, m, v", "False, 0.3, 0.01"),
    "a norm without a weight": ("None, None, m, v", "False, 0.1, 1e-05"),
}
OF_BATCH = "g, d, m, v", "True, 0.1, 1e-05"


def graph_of(layer: Layer, calls: str) -> Graph:
    """A layer `p`, calls behind it, of which the last one makes `n`, and a loss."""
    given, weight, call, result = layer
    channels = weight.split(",")[0]
    lines = [
        'graph "Folded" training=True', "",
        f'input x: float64[{given}] = batch("x")',
        f'input w: float64[{weight}] = parameter("w", trainable=True)',
        *(f'input {n}: float64[{channels}] = parameter("{n}", trainable=True)' for n in "cgd"),
        *(f'input {n}: float64[{channels}] = buffer("{n}")' for n in "mv"), "", "main main:",
        f"    p: float64[{result}] = {call}  # p",
        *(f"    {line.replace('RESULT', result)}  # {line[0]}" for line in calls.split("; ")),
        f"    square: float64[{result}] = mul(n, n)  #",
        "    loss: float64[] = mean(square)  #", "    return loss", "", "loss loss", "",
    ]  # fmt: skip
    graph = parse_graph("\n".join(lines))
    verify_graph(graph)
    return graph


def behind_norm(layer: Layer, norm: tuple[str, str]) -> Graph:
    rows, rest = norm
    return graph_of(layer, f"n: float64[RESULT] = batch_norm(p, {rows}, {rest})")


def behind_map(layer: Layer, lead: str) -> Graph:
    """A product and a sum with a column each, as norms are that users write."""
    rank, channels = layer[3].count(",") + 1, layer[1].split(",")[0]
    shape = f"{lead}{channels}{', 1' * (rank - 2)}"
    as_tuple = f"({shape}{',' * (',' not in shape)})"
    return graph_of(
        layer,
        f"s: float64[{shape}] = view(g, {as_tuple}); t: float64[{shape}] = view(d, {as_tuple});"
        " q: float64[RESULT] = mul(s, p); n: float64[RESULT] = add(q, t)",
    )


def computed(graph: Graph) -> dict[str, Tensor]:
    """The loss and all gradients, of the same numbers for all graphs of a layer."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for entry in graph.inputs:
        drawn = torch.rand(entry.value.spec.shape, generator=generator, dtype=torch.float64)
        values[entry.value.name] = (drawn + 0.5).requires_grad_(entry.trainable)
    loss = evaluate(graph, values)["loss"]
    assert loss is not None
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: own.grad for name, own in values.items() if own.grad is not None}
    return {"loss": loss.detach(), **found}


def folded(graph: Graph, named: set[str]) -> Take:
    """The way to compute the last value that these rules make, each of them once."""
    after = graph.main
    for _ in named:
        there = replace(graph, main=after)
        ways = [w for w in directions(after) if w.rule.id in named and w.result == w.rule.right[0]]
        every = (applied(graph, after, found) for found in by_rules(there, after, ways))
        after = next((made for made in every if made is not None), after)
    for way in differences(graph.main, after, tuple(sorted(named))):
        take = with_few_rules(graph.main, way) if way.values == ("n",) else None
        if take is not None and named <= set(take.rules):
            return take
    raise AssertionError(f"nothing is folded by {named}")


def check(graph: Graph, named: set[str]) -> None:
    take = folded(graph, named)
    found = derived(graph, [str(take)])
    verify_graph(found)
    assert not {"batch_norm"} & {node.op for _, node in found.unfolded()}
    one, other = computed(graph), computed(found)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert float((value - other[name]).abs().max()) <= 1e-9 * max(1, float(value.abs().max()))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_norms_with_given_statistics_are_folded(layer: str, norm: str) -> None:
    check(behind_norm(LAYERS[layer], NORMS[norm]), {NORM})


@pytest.mark.parametrize("lead", ["", "1, "])
@pytest.mark.parametrize("layer", LAYERS)
def test_products_and_sums_of_channels_are_folded(layer: str, lead: str) -> None:
    if lead and LAYERS[layer][2].startswith("linear"):
        pytest.skip("of a row there is one form")
    check(behind_map(LAYERS[layer], lead), {SCALE, SHIFT})


@pytest.mark.parametrize("layer", LAYERS)
def test_all_rules_are_proved_and_have_no_counterexample(layer: str) -> None:
    graphs = [behind_norm(LAYERS[layer], norm) for norm in NORMS.values()]
    graphs.append(behind_map(LAYERS[layer], ""))
    found = [own for graph in graphs for own in folds(graph.main)]
    assert {own.id for own in found} == {NORM, SCALE, SHIFT}
    axioms = pytest.importorskip("parloom.rewrite.generation.axioms", exc_type=ImportError)
    for own in found:
        assert prove(own) == ""
        assert axioms.prove_by_axioms(own) == ""
        assert not any(counterexample(own, seed) for seed in range(3))


def test_norms_of_the_batch_are_not() -> None:
    graph = graph_of(
        LAYERS["an image"],
        "n: float64[RESULT], a: float64[5], b: float64[5] = batch_norm(p, g, d, m, v,"
        f" {OF_BATCH[1]})",
    )
    assert not list(folds(graph.main))
    whole = behind_norm(LAYERS["an image"], NORMS["a norm"])
    (own, _) = folds(whole.main)
    text = str(own.left[0]).replace("False", "True")
    inputs = ", ".join(map(str, own.inputs))
    assert prove(rule("own", inputs, [text], [text])).startswith("no normal form")


@pytest.mark.parametrize("dtype", NARROW)
def test_in_16_bits_what_makes_larger_errors_is_not(dtype: str) -> None:
    """The gradients of means and variances have such."""
    layer = LAYERS["a product with a bias"]
    wide = behind_norm(layer, NORMS["a norm"]), behind_map(layer, "")
    norm, scaled = (parse_graph(print_graph(own).replace("float64", dtype)) for own in wide)
    assert not any(may_round(own, dtype) for own in folds(norm.main) if own.id == NORM)
    with pytest.raises(InputError, match=f"twice as large by {NORM} in {dtype}"):
        derived(norm, [str(folded(wide[0], {NORM}))])
    with pytest.raises(AssertionError, match="nothing is folded"):
        folded(norm, {NORM})
    assert derived(scaled, [str(folded(scaled, {SCALE, SHIFT}))])


def trains_more(graph: Graph, take: Take, *frozen: str) -> bool:
    """Whether a way makes more gradients of weights, where some are frozen."""
    inputs = tuple(
        replace(e, trainable=e.trainable and e.target not in frozen) for e in graph.inputs
    )
    graph = replace(graph, inputs=inputs)
    body, costs = Body(graph.main, 1000), FunctionCosts(OneDevice(request_of(graph)), "main")
    return Values(body, [costs], weights_of(graph, graph.main)).grows(take.call, body.classes)


def test_folds_in_frozen_weights_make_no_gradients_of_them() -> None:
    """A scaled weight that trains has as many numbers as the weight, and more than its scale."""
    graph = behind_norm(LAYERS["an image"], NORMS["a norm"])
    take = folded(graph, {NORM})
    assert not trains_more(graph, take)
    assert not trains_more(graph, take, "g", "d")
    assert trains_more(graph, take, "w")
    assert not trains_more(graph, take, "w", "g")
    assert not trains_more(graph, take, "w", "g", "d")


def test_low_rank_factors_that_train_are_not_multiplied() -> None:
    lines = [
        'graph "Adapted" training=True', "",
        *(f'input {name}: float32[{shape}] = parameter("{name}", trainable=True)'
          for name, shape in (("y", "4, 8"), ("w", "6, 8"), ("a", "2, 8"), ("b", "6, 2"))),
        'input x: float32[4, 8] = batch("x")', "", "main main:",
        "    i: float32[4, 8] = add(x, y)  #",
        "    p: float32[4, 6] = linear(i, w)  #", "    l: float32[4, 2] = linear(i, a)  #",
        "    u: float32[4, 6] = linear(l, b)  #", "    n: float32[4, 6] = add(p, u)  #",
        "    loss: float32[] = mean(n)  #", "    return loss", "", "loss loss", "",
    ]  # fmt: skip
    graph = parse_graph("\n".join(lines))
    take = parse_take("take n in main by own: linear(i, add(w, mm(b, a)))")
    assert take is not None
    assert trains_more(graph, take, "w")
    assert trains_more(graph, take, "w", "a")
    assert not trains_more(graph, take, "w", "a", "b")
    wide = parse_graph("\n".join(lines).replace("2, 8]", "7, 8]").replace("6, 2]", "6, 7]")
                       .replace("4, 2]", "4, 7]"))  # fmt: skip
    assert not trains_more(wide, take, "w")


INPUTS = "x[b, k, p], w[n, k, 1 + 1], c[n], g[n], d[n], m[n], v[n]"
LEFT = "batch_norm(conv1d(x, w, c, 1, 0), g, d, m, v, False, 0.1, 1e-05)"
INVERSE = "mul(rsqrt(add(v, 1e-05)), g)"
RIGHT = f"conv1d(x, mul(w, view({INVERSE}, (n, 1, 1))), add(mul(sub(c, m), {INVERSE}), d), 1, 0)"
WRONG = {
    "without the mean": ("sub(c, m)", "c"),
    "the bias after the scale": ("mul(sub(c, m), ", "add(mul(c, 1.0), "),
    "another eps": (f"view({INVERSE}", f"view({INVERSE.replace('1e-05', '0.001')}"),
    "without the weight": (f"view({INVERSE}", "view(rsqrt(add(v, 1e-05))"),
    "the variance itself": (f"view({INVERSE}", "view(mul(add(v, 1e-05), g)"),
    "the weight twice": (f"view({INVERSE}", f"view(mul({INVERSE}, g)"),
    "another bias": (", d), 1, 0)", ", g), 1, 0)"),
}


def test_a_right_rule_is_proved() -> None:
    own = rule("own", INPUTS, [LEFT], [RIGHT])
    axioms = pytest.importorskip("parloom.rewrite.generation.axioms", exc_type=ImportError)
    assert prove(own) == axioms.prove_by_axioms(own) == ""
    assert not any(counterexample(own, seed) for seed in range(5))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_refused_and_have_a_counterexample(name: str) -> None:
    old, new = WRONG[name]
    assert old in RIGHT
    own = rule("own", INPUTS, [LEFT], [RIGHT.replace(old, new)])
    axioms = pytest.importorskip("parloom.rewrite.generation.axioms", exc_type=ImportError)
    assert prove(own)
    assert axioms.prove_by_axioms(own).startswith("Z3 says")
    assert any(counterexample(own, seed) for seed in range(5))


def test_norms_with_given_statistics_are_one_along_their_samples() -> None:
    """Those of one weight, with the convolutions before them."""
    rows = "g, d, m, v, False, 0.1, 1e-05"
    layer = "4, 6, 9", "5, 6, 3", "conv1d(x, w)", "4, 5, 7"
    graph = graph_of(
        layer,
        "h: float64[4, 6, 9] = mul(x, 0.5); q: float64[RESULT] = conv1d(h, w);"
        f" a: float64[RESULT] = batch_norm(p, {rows}); b: float64[RESULT] = batch_norm(q, {rows});"
        " e: float64[RESULT] = mul(b, 0.5); n: float64[RESULT] = add(a, e)",
    )
    takes = [own for own in fusions(graph, graph.main) if own.values == ("a", "b")]
    (take,) = (own for own in takes if set(own.rules) == {"batch_norm_along_d0", "conv1d_along_n"})
    one, other = computed(graph), computed(derived(graph, [str(take)]))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert float((value - other[name]).abs().max()) <= 1e-9 * max(1, float(value.abs().max()))


def test_edited_folds_are_refused() -> None:
    graph = behind_norm(LAYERS["an image with a bias"], NORMS["a norm"])
    take = folded(graph, {NORM})
    for old, new in (("sub(c, m)", "c"), ("1e-05", "0.01"), ("(0, 1)", "(1, 0)")):
        assert old in str(take)
        with pytest.raises(InputError):
            derived(graph, [str(take).replace(old, new)])
    wrong = parse_take(str(take))
    assert wrong is not None
    with pytest.raises(InputError, match="no rule 'fold_batch_morn'; did you mean"):
        derived(graph, [str(replace(wrong, rules=("fold_batch_morn",)))])
