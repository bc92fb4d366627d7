"""Forms of a graph: each is the rewritten graph, and the search over all of them at once has the
least of what each costs alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, product
from random import Random

import pytest

from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.errors import InputError
from parloom.ir.graph import Graph, Node
from parloom.ir.mesh import Mesh
from parloom.ir.ops.shape import EITHER
from parloom.ir.text import parse_graph
from parloom.ir.verify import verify_graph
from parloom.rewrite.forms import Form, Forms, Place
from parloom.rewrite.merge import merges
from parloom.rewrite.rewrites import rewritten
from parloom.rewrite.take import NONE, Take, compatible, parse_take
from parloom.search.contexts import Contexts
from parloom.search.decide import form_of
from parloom.search.meshes import logical_meshes
from parloom.search.request import Request, base_of
from parloom.search.step_rows import Passes, ShadowPrices, row_prices
from tests.property import test_bodies
from tests.property.searched import ADAM, PLENTY

PASSES = Passes(1)
PRICES = row_prices(ShadowPrices(), PASSES)
"""Without a price of memory: what takes one of several values cannot make it again."""


def random_graph(rng: Random, shared: float = 0.0) -> Graph:
    """Products of a few values, added up, with activations between; a share of them with weights
    that others have, too.
    """
    rows, width = rng.choice((64, 512)), rng.choice((64, 256))
    shape = f"float32[{rows}, {width}]"
    values, body, weights, products = ["x"], list[str](), 0, 0
    named = rng.random() < 0.7
    for layer in range(rng.randint(1, 3)):
        operand, made = rng.choice(values), []
        for index in range(rng.randint(2, 3)):
            made.append(f"p{layer}_{index}")
            path = f"m{layer}_{index}" if named else ""
            note = f"# {path}" if named else f'# "" #{products}'
            known = rng.randrange(weights) if weights and rng.random() < shared else weights
            body.append(f"{made[-1]}: {shape} = linear({operand}, w{known})  {note}")
            weights, products = weights + (known == weights), products + 1
        total = made[0]
        for index, other in enumerate(made[1:]):
            kind = rng.choice(("add", "mul"))
            body.append(f"s{layer}_{index}: {shape} = {kind}({total}, {other})  # s{layer}_{index}")
            total = f"s{layer}_{index}"
        if rng.random() < 0.5:
            body.append(f"a{layer}: {shape} = relu({total})  # a{layer}")
            total = f"a{layer}"
        values.append(total)
    lines = [
        'graph "Forms" training=True',
        "",
        f'input x: {shape} = batch("x")',
        f'input y: {shape} = batch("y")',
        *(
            f'input w{i}: float32[{width}, {width}] = parameter("w{i}", trainable=True)'
            for i in range(weights)
        ),
        "",
        "main main:",
        *(f"    {line}" for line in body),
        f"    loss: float32[] = mse_loss({values[-1]}, y)  #",
        "    return loss",
        "",
        "loss loss",
        "",
    ]
    return parse_graph("\n".join(lines))


def some_of(found: list[Take]) -> list[tuple[Take, ...]]:
    return list(chain.from_iterable(combinations(found, n) for n in range(len(found) + 1)))


def taken(forms: Forms, some: Sequence[Take]) -> dict[Place, int]:
    """What operators take where these takes are made."""
    values = {value for take in some for value in take.values}
    main = forms.graph.main
    nodes = (item for item in main.body if isinstance(item, Node) and item.op == EITHER)
    return {
        (main.name, node.key): int(node.results[0].name in values)
        for node in nodes
        if len(node.refs) > 1
    }


@pytest.mark.parametrize("seed", range(20))
def test_each_form_is_the_rewritten_graph(seed: int) -> None:
    graph = random_graph(Random(seed))
    found = list(merges(graph))
    forms = Forms(graph, found)
    verify_graph(forms.graph)
    seen = set()
    for some in some_of(found):
        form = forms.form(taken(forms, some))
        assert set(form.rewrites) == set(map(str, some))
        assert form.graph == rewritten(graph, form.rewrites)
        assert {flat.key for flat in form.graph.flat()} == {key for _, key in form.places}
        seen.add(form.graph.main)
    assert len(seen) == 2 ** len(found) > 1


def least(request: Request, mesh: Mesh, forms: Forms | None = None) -> tuple[float, Form]:
    """The least estimate on a mesh, and the form that has it."""
    contexts = Contexts(request, base_of(request), forms)
    program = contexts.on(mesh, 1)
    assert program is not None
    context = contexts.search(program, mesh, 1)
    _, values = context.columns.minimum(PRICES, 0.0)
    rows = context.layouts.evaluate(values, PRICES)
    return float(rows @ PRICES), form_of(context.layouts, values)


@pytest.mark.sample(9)
@pytest.mark.parametrize("shared", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(12))
def test_the_least_of_all_forms_is_found_at_once(seed: int, shared: float) -> None:
    rng = Random(seed)
    graph = random_graph(rng, shared)
    found, cluster = (
        list(merges(graph)),
        load_cluster(rng.choice(("1x4xH100", "2x2xV100", "4xcpu"))),
    )
    request = Request(graph, DataSheets(cluster), ADAM, PLENTY)
    for mesh in list(logical_meshes(cluster))[:2]:
        each = {}
        for some in some_of(found):
            texts = tuple(map(str, some))
            alone = replace(request, graph=rewritten(graph, texts))
            each[texts], _ = least(alone, mesh)
        best, form = least(request, mesh, Forms(graph, found))
        assert best == pytest.approx(min(each.values()), rel=1e-9)
        assert each[form.rewrites] == pytest.approx(best, rel=1e-9)


def each_combination(graph: Graph, takes: Sequence[Take]) -> Iterator[tuple[Take, ...]]:
    """At most one take of each value, as far as they go together."""
    values = dict.fromkeys(value for take in takes for value in take.values if value != NONE)
    ways = [(None, *(take for take in takes if value in take.values)) for value in values]
    for chosen in product(*ways):
        some = tuple(dict.fromkeys(take for take in chosen if take is not None))
        try:
            rewritten(graph, tuple(map(str, some)))
        except InputError:
            continue
        yield some


@pytest.mark.parametrize("seed", range(10))
def test_the_least_is_found_among_what_rules_give(seed: int) -> None:
    rng = Random(seed)
    graph = test_bodies.random_graph(rng)
    every = test_bodies.takes_in(graph)
    takes = compatible(graph.main, rng.sample(every, min(5, len(every))))
    cluster = load_cluster("1x2xV100")
    request = Request(graph, DataSheets(cluster), ADAM, PLENTY)
    for mesh in list(logical_meshes(cluster))[:1]:
        each = {}
        for some in each_combination(graph, takes):
            texts = frozenset(map(str, some))
            alone = replace(request, graph=rewritten(graph, tuple(texts)))
            each[texts], _ = least(alone, mesh)
        best, form = least(request, mesh, Forms(graph, takes))
        assert best == pytest.approx(min(each.values()), rel=1e-9)
        assert each[frozenset(form.rewrites)] == pytest.approx(best, rel=1e-9)


SHARED = """graph "Shared" training=True

input x: float32[256, 64] = batch("x")
input y: float32[256, 64] = batch("y")
input z: float32[256, 64] = batch("z")
input w: float32[64, 64] = parameter("w", trainable=True)
input v: float32[64] = parameter("v", trainable=True)

main main:
    a: float32[256, 64] = linear(x, w)  # a
    b: float32[256, 64] = linear(y, w)  # b
    d: float32[256, 64] = relu(a)  # d
    e: float32[256, 64] = relu(b)  # e
    c: float32[256, 64] = mul(z, v)  # c
    f: float32[256, 64] = relu(c)  # f
    g: float32[256, 64] = mul(d, e)  # g
    h: float32[256, 64] = mul(g, f)  # h
    loss: float32[] = mean(h)  #
    return loss

loss loss
"""


@pytest.mark.parametrize("order", [1, -1])
def test_ways_may_share_some_of_their_values(order: int) -> None:
    """Two values have two other ways, a third one has one of these."""
    graph = parse_graph(SHARED)
    calls = {
        "d, e": "split_with_sizes(relu(linear(cat((x, y), 0), w)), (256, 256), 0)",
        "d, e, f": "split_with_sizes(relu(cat((a, b, c), 0)), (256, 256, 256), 0)",
    }
    takes = [parse_take(f"take {own} in main by r: {call}") for own, call in calls.items()][::order]
    found = [take for take in takes if take is not None]
    request = Request(graph, DataSheets(load_cluster("1x2xV100")), ADAM, PLENTY)
    forms = Forms(graph, found)
    for mesh in list(logical_meshes(request.cluster))[:1]:
        each = {}
        for some in each_combination(graph, found):
            texts = tuple(map(str, some))
            each[texts], _ = least(replace(request, graph=rewritten(graph, texts)), mesh)
            for take in some:
                form = forms.form(dict(forms.positions[take]))
                assert form.graph == rewritten(graph, (str(take),))
        assert len(each) == 3
        best, form = least(request, mesh, forms)
        assert best == pytest.approx(min(each.values()), rel=1e-9)
        assert each[form.rewrites] == pytest.approx(best, rel=1e-9)
    pairs = {(one[1], other[1]) for one, other in forms.together}
    assert any(at != to for at, to in pairs) == (order == 1)
