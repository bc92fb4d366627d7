"""Takes by known rules: each computes the same, follows from the rules that it names, and from
nothing else.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from parloom.errors import InputError
from parloom.ir.graph import Graph
from parloom.ir.text import parse_graph
from parloom.ir.verify import verify_graph
from parloom.rewrite import known
from parloom.rewrite.bodies import Body
from parloom.rewrite.follows import follows, named_rules, with_few_rules
from parloom.rewrite.known import Known, cases, holds, is_rule, known_rules
from parloom.rewrite.merge import merges
from parloom.rewrite.rewrites import derived, rewritten
from parloom.rewrite.rules import counterexample, rule
from parloom.rewrite.substitutions import by_rules, differences, directions
from parloom.rewrite.take import Take
from parloom.rewrite.terms import Term, names_in
from tests.property.test_bodies import computed, random_graph
from tests.property.test_substitutions import walk

SEEDS, WALKS = range(5), range(4)


def ways_in(graph: Graph) -> list[Take]:
    """What one rule at one place makes of main, but for the order of operands."""
    every = by_rules(graph, graph.main, directions(graph.main))
    known = {(node.op, frozenset(node.refs)) for _, node in graph.unfolded()}
    takes = (take for found in every for take in found.takes)
    return [t for t in takes if (t.call.op, frozenset(names_in(t.call))) not in known]


def drawn_in(graph: Graph) -> Iterator[Take]:
    """What several rules one after the other make, by any of these."""
    for seed in WALKS:
        after, rules = walk(graph, Random(seed))
        yield from differences(graph.main, after, rules)


def found_in(graph: Graph) -> list[Take]:
    """The same, by as few rules as are needed."""
    every = (with_few_rules(graph.main, take) for take in drawn_in(graph))
    return list(dict.fromkeys(take for take in every if take is not None))


@pytest.mark.parametrize("seed", SEEDS)
def test_known_rules_compute_the_same(seed: int) -> None:
    graph = random_graph(Random(seed))
    expected = computed(graph.main)["loss"]
    for take in found_in(graph):
        found = derived(graph, [str(take)])
        verify_graph(found)
        assert (computed(found.main)["loss"] == expected).all()


def test_most_follow_from_few_rules() -> None:
    graphs = [random_graph(Random(seed)) for seed in SEEDS]
    ways = [(graph, take) for graph in graphs for take in drawn_in(graph)]
    takes = [take for graph, way in ways if (take := with_few_rules(graph.main, way)) is not None]
    assert len(takes) > 0.7 * len(ways) > 10
    assert {len(take.rules) for take in takes} >= {1, 2}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_way_by_other_rules_or_of_other_values_is_refused(seed: int) -> None:
    graph = random_graph(Random(seed))
    for take in found_in(graph)[:3]:
        rules = named_rules(graph.main, take)
        assert follows(graph.main, take, rules)
        for left_out in rules:
            assert not follows(graph.main, take, [own for own in rules if own is not left_out])
        wrong = replace(take, call=Term("add", (take.call, take.call)))
        assert not follows(graph.main, wrong, rules)
        with pytest.raises(InputError, match="does not follow from"):
            derived(graph, [str(replace(take, call=Term("relu", (take.call,))))])
        with pytest.raises(InputError, match="no rule 'add_lineer'; did you mean"):
            derived(graph, [str(replace(take, rules=("add_lineer",)))])


def test_a_rule_that_was_edited_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It matches, but is not proved."""
    wrong = rule("wrong", "x[*, k], w[n, k]", ["linear(x, w)"], ["linear(add(x, x), w)"])
    assert counterexample(wrong, 0)
    monkeypatch.setattr(known, "known_rules", lambda: {"wrong": Known(wrong, frozenset())})
    graph = random_graph(Random(0))
    assert ways_in(graph) == []
    node = next(n for _, n in graph.unfolded() if n.op == "linear")
    x, w = node.refs
    text = f"take {node.results[0].name} in main by wrong: linear(add({x}, {x}), {w})"
    assert rewritten(graph, [text])
    with pytest.raises(InputError, match="does not follow from wrong"):
        derived(graph, [text])


def test_all_rules_of_the_file_hold() -> None:
    rules = known_rules()
    assert len(rules) > 500
    assert sum(own.narrow >= {"bfloat16", "float16"} for own in rules.values()) > 500
    for own in Random(0).sample(list(rules.values()), 60):
        assert holds(own.rule), own.rule.id
        assert not counterexample(own.rule, 1), own.rule.id


def test_rules_have_cases_for_other_functions_and_numbers() -> None:
    graph = random_graph(Random(3))
    assert any(node.op == "relu" for _, node in graph.unfolded())
    named = {own.rule.id for own in cases(graph.main)}
    relus = {name for name in named if name.endswith("_relu")}
    assert relus
    assert all(map(is_rule, relus))
    assert not is_rule("add_lineer")


def test_only_what_is_true_is_a_case() -> None:
    for name, own in known_rules().items():
        assert not is_rule(f"{name}_nonsense")
        assert not is_rule(f"{name}_linear")
        assert is_rule(f"{name}_tanh") == own.of_function
    assert not is_rule("add_304601_nonsense")
    for number in (0.25, -0.25, 1e-5, 3):
        graph = parse_graph(SCALED.replace("0.25", str(number)))
        scaled = [own.rule for own in cases(graph.main) if own.number is not None]
        assert scaled
        assert all(is_rule(own.id) == holds(own) for own in scaled)
    assert not is_rule("mul_cat_729b4a_00p5")


SCALED = """graph "Scaled" training=True

input x: float32[4, 6] = batch("x")

main main:
    a: float32[4, 6] = mul(x, 0.25)  # a
    loss: float32[] = mean(a)  #
    return loss

loss loss
"""


def masked(dtype: str, text: str = "mul(h, a)", other: str = "") -> Graph:
    """Two products of a value, or two calls, added up."""
    other = other or text.replace("a", "b")
    lines = [
        'graph "Masked" training=True', "",
        'input h: float32[64, 64] = batch("h")',
        *(f'input {n}: {dtype}[64, 64] = batch("{n}")' for n in "ab"), "", "main main:",
        f"    p: float32[64, 64] = {text}  # p", f"    q: float32[64, 64] = {other}  # q",
        "    s: float32[64, 64] = add(p, q)  # s", "    loss: float32[] = mean(s)  #",
        "    return loss", "", "loss loss", "",
    ]  # fmt: skip
    return parse_graph("\n".join(lines))


def test_arithmetic_of_integers_and_masks_is_not_that_of_numbers() -> None:
    """Sums of masks are "or", those of bytes wrap around."""
    text = "take s in main by mul_add_02fc75: mul(add(a, b)[0], h)"
    assert any(take.values == ("s",) for take in ways_in(masked("float32")))
    derived(masked("float32"), [text])
    for dtype in ("bool", "uint8", "int64"):
        graph = masked(dtype)
        assert not ways_in(graph)
        with pytest.raises(InputError, match="does not follow from"):
            derived(graph, [text])


def test_results_of_another_dtype_than_their_operands_are_inputs() -> None:
    graph = masked("int32", "mul(a, 0.5)")
    assert not ways_in(graph)


def test_numbers_that_are_not_finite_are_no_numbers() -> None:
    graph = masked("float32", "mul(a, 1e999)")
    assert not [take for take in ways_in(graph) if take.values == ("s",)]
    with pytest.raises(InputError, match="does not follow from"):
        derived(graph, ["take s in main by mul_add_02fc75: mul(add(a, b)[0], 1e999)"])


def test_signs_of_zeros_are_told_apart() -> None:
    """Python has them equal, and calls may tell."""
    for other, is_one in (("0.0", True), ("-0.0", False)):
        graph = masked("float32", "copysign(h, 0.0)", f"copysign(h, {other})")
        body = Body(graph.main, 1_000)
        assert (body.class_of("p") == body.class_of("q")) == is_one


def test_rules_that_are_named_are_needed() -> None:
    """A call in its own place follows from any rule, and from none."""
    graph = masked("float32")
    for text in (
        "take s in main by add_304601: add(p, q)",
        "take s in main by merge_linear: add(p, q)",
    ):
        with pytest.raises(InputError, match="does not follow from"):
            derived(graph, [text])


WORDS = (
    "None", "1e999", "-1", "7", "'x'", "()", "(1,)", "True", "[0]", "[3]", ",", "(", ")",
    "relu", "add", "mul", "cat", "sum", "view", "embedding", "softmax", "split_with_sizes",
    "conv1d", "einsum", "layer_norm", "dropout", "parloom.linears", "parloom.convs",
)  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_an_edited_way_is_refused_in_one_line(seed: int) -> None:
    rng, graph = Random(seed), random_graph(Random(seed))
    words, expected = [*WORDS, *graph.main.specs()], computed(graph.main)["loss"]
    for take in [*found_in(graph), *merges(graph)]:
        for _ in range(40):
            parts = re.findall(r"\w+(?:\.\w+)?|\W", str(take))
            at = rng.randrange(len(parts))
            parts[at : at + rng.choice((0, 1, 1, 2))] = [rng.choice(words)]
            said = ""
            try:
                found = derived(graph, ["".join(parts)])
            except InputError as error:
                found, said = graph, str(error)
            assert (computed(found.main)["loss"] == expected).all()
            assert "\n" not in said
            assert len(said) < 1_000
