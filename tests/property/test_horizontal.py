"""Horizontal fusion: calls are one along a factor exactly where that is true."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from parloom.errors import InputError
from parloom.ir.graph import Graph, Node
from parloom.ir.text import parse_graph
from parloom.ir.verify import verify_graph
from parloom.rewrite.generation.axioms import prove_by_axioms
from parloom.rewrite.horizontal import Along, Kind, fusions, is_fusion, joinable, name_of, refusal
from parloom.rewrite.merge import refusal as merge_refusal
from parloom.rewrite.merge import rule_of
from parloom.rewrite.rewrites import derived
from parloom.rewrite.rules import counterexample, prove
from parloom.rewrite.take import compatible, with_takes
from parloom.search.rewritten import made_together
from tests.property.cases import all_cases
from tests.property.one_operator import Program
from tests.property.test_bodies import computed


@cache
def kinds() -> tuple[tuple[Kind, Along], ...]:
    """Calls of all operators, each with a factor along which its rule says that they are alike."""
    found = dict[tuple[Kind, Along], None]()
    for program in map(Program, all_cases()):
        for node in (item for item in program.graph.main.body if isinstance(item, Node)):
            found |= dict.fromkeys(joinable(node, program.graph.main.specs()))
    return tuple(found)


def test_calls_that_are_one_by_proof_are_one_in_numbers() -> None:
    proved = [own for own in kinds() if not refusal(*own)]
    assert len({kind.op for kind, _ in proved}) > 60
    for kind, along in proved:
        for seed in range(3):
            assert not counterexample(kind.rule(along), seed), kind.rule(along)


def others(kind: Kind, along: Along) -> Iterator[Along]:
    """The same along other dims."""
    ranks = [len(dims) for dims in kind.operands]
    for index, (dim, rank) in enumerate(zip(along.operands, ranks, strict=True)):
        for other in range(-rank, 0):
            dims = list(along.operands)
            dims[index] = other
            if other != dim:
                yield replace(along, operands=tuple(dims))


@pytest.mark.slow
def test_calls_are_one_along_no_other_dims() -> None:
    """Each of these is refused or true, and most are refused."""
    refused = 0
    for kind, along in kinds():
        for other in others(kind, along):
            if refusal(kind, other):
                refused += 1
            else:
                assert not counterexample(kind.rule(other), 0), kind.rule(other)
    assert refused > 200


def test_both_proofs_hold() -> None:
    named = ("linear", "mm", "matmul", "conv1d", "embedding", "relu", "add", "softmax", "sum")
    proved = {own for own in kinds() if own[0].op in named and not refusal(*own)}
    found = [own for own in proved if not prove_by_axioms(own[0].rule(own[1]))]
    assert {kind.op for kind, _ in found} >= {"linear", "relu", "add"}


TOWERS = """graph "Towers" training=True

input x: float32[4, 6] = batch("x")
input y: float32[3, 6] = batch("y")
input z: float32[4, 6] = batch("z")
input w: float32[5, 6] = parameter("w", trainable=True)
input c: float32[5] = parameter("c", trainable=True)
input v: float32[5, 5] = parameter("v", trainable=True)

main main:
    a: float32[4, 5] = linear(x, w, c)  # a
    b: float32[3, 5] = linear(y, w, c)  # b
    d: float32[4, 5] = relu(a)  # d
    e: float32[3, 5] = relu(b)  # e
    f: float32[4, 5] = linear(d, v)  # f
    g: float32[3, 5] = linear(e, v)  # g
    h: float32[7, 5] = cat((f, g), 0)  # h
    i: float32[4, 5] = add(d, z)  # i
    j: float32[] = sum(h)  #
    k: float32[] = sum(i)  #
    loss: float32[] = add(j, k)  #
    return loss

loss loss
"""


def test_whole_chains_are_one() -> None:
    graph = parse_graph(TOWERS.replace('float32[4, 6] = batch("z")', 'float32[4, 5] = batch("z")'))
    takes = list(fusions(graph, graph.main))
    chain = "linear(relu(linear(cat((x, y), -2), w, c)), v)"
    assert [str(take.call) for take in takes] == [
        f"split_with_sizes({chain}, (4, 3), -2)", chain,
    ]  # fmt: skip
    assert takes[1].rules == ("linear_along_d0", "relu_along_d0")
    expected = computed(graph.main)["loss"]
    for take in takes:
        found = derived(graph, [str(take)])
        assert (computed(found.main)["loss"] == expected).all()
    wrong = str(takes[0]).replace("cat((x, y)", "cat((y, x)")
    with pytest.raises(InputError, match="does not follow from linear_along_d0, relu_along_d0"):
        derived(graph, [wrong])


def test_what_only_moves_elements_is_no_reason_to_fuse() -> None:
    lines = [
        'graph "Views" training=True', "",
        'input x: float32[4, 6] = parameter("x", trainable=True)',
        'input y: float32[3, 6] = parameter("y", trainable=True)', "", "main main:",
        "    a: float32[4, 2, 3] = view(x, (4, 2, 3))  #",
        '    b: float32[3, 2, 3] = view(y, (3, 2, 3))  # "" #1',
        "    c: float32[4, 3, 2] = transpose(a, 1, 2)  #",
        '    d: float32[3, 3, 2] = transpose(b, 1, 2)  # "" #1',
        "    e: float32[7, 3, 2] = cat((c, d), 0)  #",
        "    loss: float32[] = sum(e)  #", "    return loss", "", "loss loss", "",
    ]  # fmt: skip
    graph = parse_graph("\n".join(lines))
    assert not list(fusions(graph, graph.main))
    lines[8:10] = [line.replace("transpose(", "softmax(").replace(", 1, 2)", ", 2)")
                   .replace("3, 2]", "2, 3]") for line in lines[8:10]]  # fmt: skip
    lines[10] = lines[10].replace("3, 2]", "2, 3]")
    graph = parse_graph("\n".join(lines))
    _, take = fusions(graph, graph.main)
    assert str(take.call) == "softmax(view(cat((x, y), -2), (7, 2, 3)), -1)"
    assert (
        computed(derived(graph, [str(take)]).main)["loss"] == computed(graph.main)["loss"]
    ).all()


def random_towers(rng: Random) -> Graph:
    """Chains of one to three inputs by weights that some share, in any order."""
    names, lines, weights = [f"x{i}" for i in range(3)], list[str](), dict[str, None]()
    widths, values = dict.fromkeys(names, 6), list(names)
    for index in range(12):
        one, kind = rng.choice(values), rng.choice(("linear", "linear", "relu", "mul", "add"))
        if kind == "linear":
            weight = f"w{rng.randrange(2)}"
            weights[weight] = None
            call = f"linear({one}, {weight})"
        else:
            call = {"relu": f"relu({one})", "mul": f"mul({one}, 0.5)",
                    "add": f"add({one}, {rng.choice(values)})"}[kind]  # fmt: skip
        made = f"v{index}"
        widths[made] = 6
        values.append(made)
        lines.append(f"    {made}: float32[4, 6] = {call}  # m{index}")
    sums = [f"    s{i}: float32[] = sum({name})  #" for i, name in enumerate(values)]
    total = [
        f"    t{i}: float32[] = add({f't{i - 1}' if i else 's0'}, s{i})  #"
        for i in range(len(values))
    ]
    return parse_graph("\n".join([
        'graph "Towers" training=True', "",
        *(f'input {name}: float32[4, 6] = parameter("{name}", trainable=True)' for name in names),
        *(f'input {name}: float32[6, 6] = parameter("{name}", trainable=True)' for name in weights),
        "", "main main:", *lines, *sums, *total, f"    return t{len(values) - 1}", "",
        f"loss t{len(values) - 1}", "",
    ]))  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_what_is_fused_computes_the_same(seed: int) -> None:
    graph = random_towers(Random(seed))
    loss = graph.loss
    assert loss is not None
    expected = computed(graph.main)[loss]
    takes = [take for take in fusions(graph, graph.main) if made_together(graph, [take])]
    assert takes
    for take in takes:
        found = derived(graph, [str(take)])
        verify_graph(found)
        assert (computed(found.main)[loss] == expected).all()
    # Those that may be chosen beside each other, as far as no value is taken twice.
    taken, values = [], set[str]()
    for take in compatible(graph.main, takes):
        if values.isdisjoint(name for _, name in take.taken):
            taken.append(take)
            values |= {name for _, name in take.taken}
    found = with_takes(graph, taken)
    assert (computed(found.main)[loss] == expected).all()


MERGED = [
    ("linear", (), (), True),
    ("linear", (), (), False),
    ("conv1d", (3,), ((2,), (1,), (1,)), True),
    ("conv2d", (1, 7), ((1, 1), (0, 3), (1, 1)), True),
    ("conv2d", (5, 5), ((2, 2), (2, 2), (1, 1)), False),
    ("conv3d", (2, 2, 2), ((1, 1, 1),), False),
    ("conv1d", (4,), ((1,), "same", (1,)), True),
    ("conv2d", (2, 3), ((1, 1), "same", (3, 1)), False),
    ("conv2d", (2, 2), ((1, 2), "valid"), True),
]  # fmt: skip


@pytest.mark.parametrize("one", MERGED, ids=str)
def test_products_of_one_operand_are_one(
    one: tuple[str, tuple[int, ...], tuple[tuple[int, ...] | str, ...], bool],
) -> None:
    found = rule_of(*one)
    assert not merge_refusal(*one)
    assert not counterexample(found, 0)
    swapped = replace(found, left=found.left[::-1])
    assert prove(swapped)
    assert counterexample(swapped, 0)


def test_products_that_cannot_be_proved_to_be_one_are_none() -> None:
    assert "reflect" in merge_refusal("conv2d", (3, 3), ((1, 1), "reflect", (2, 2)), False)


def test_names_of_rules() -> None:
    assert is_fusion("linear_along_d0")
    missed = {(kind.op, own.factor) for kind, own in kinds()
              if not is_fusion(name_of(kind.op, own.factor))}  # fmt: skip
    assert not missed
    assert not is_fusion("parloom_linears_along_d0")  # several results
    assert not is_fusion("linear_along_zzz")
    assert not is_fusion("linear_along_k")
    assert not is_fusion("mm_along_d0")
    assert not is_fusion("liner_along_d0")
    assert not is_fusion("linear_add_123456")
