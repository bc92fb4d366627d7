"""Which parameters lie in one memory, as lowering decides it, and what that costs."""

from dataclasses import replace

import pytest

from parloom.codegen.source import generate
from parloom.cost.clusters import load_cluster
from parloom.cost.step import priced
from parloom.cost.walk import Walker
from parloom.errors import VerifyError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.pcg import PCG, Compute, PFunction
from parloom.ir.pcg_text import print_pcg
from parloom.ir.plan import Decisions, NodeDecision, ParameterDecision, Storage, one_stage
from parloom.ir.step_program import EACH_PASS, step_program
from parloom.ir.text import parse_graph
from parloom.ir.verify import verify_graph, verify_pcg
from parloom.search.choices import Choice
from parloom.search.folding import program_of
from parloom.search.prices import FORWARD, KEPT, Prices
from parloom.search.program import State

TEXT = """\
graph "Merged" training=True

input x: float32[8, 16] = batch("x")
input w_0: float32[32, 16] = parameter("0.w", trainable=True)
input c_0: float32[32] = parameter("0.c", trainable=True)
input v_0: float32[16, 16] = parameter("0.v", trainable=True)
input d_0: float32[16] = parameter("0.d", trainable=True)
input u_0: float32[16, 48] = parameter("0.u", trainable=True)
input w_1: float32[32, 16] = parameter("1.w", trainable=True)
input c_1: float32[32] = parameter("1.c", trainable=True)
input v_1: float32[16, 16] = parameter("1.v", trainable=True)
input d_1: float32[16] = parameter("1.d", trainable=True)
input u_1: float32[16, 48] = parameter("1.u", trainable=True)

def block(
    hidden: float32[8, 16],
    w: float32[32, 16],
    c: float32[32],
    v: float32[16, 16],
    d: float32[16],
    u: float32[16, 48],
):
    wide: float32[8, 32], narrow: float32[8, 16] = parloom.linears(hidden, (w, v), (c, d))  # both
    both: float32[8, 48] = cat((wide, narrow), 1)
    active: float32[8, 48] = relu(both)  # act
    out: float32[8, 16] = linear(active, u)  # out
    return out

main main:
    a: float32[8, 16] = block["0"](x, w_0, c_0, v_0, d_0, u_0)
    b: float32[8, 16] = block["1"](a, w_1, c_1, v_1, d_1, u_1)
    loss: float32[] = sum(b)
    return loss

loss loss
"""
GRAPH = verify_graph(parse_graph(TEXT))
FIRST, SECOND = ((f"{i}.w", f"{i}.v") for i in range(2))
BIASES = tuple((f"{i}.c", f"{i}.d") for i in range(2))
ALL = (FIRST, BIASES[0], SECOND, BIASES[1])
MESH = grid({"x": 2, "y": 2})


def changed(*pairs: tuple[str, str]) -> Graph:
    text = TEXT
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return verify_graph(parse_graph(text))


def lowered(
    graph: Graph = GRAPH,
    stored: dict[str, tuple[str, ...]] | None = None,
    both: dict[str, tuple[str, ...]] | None = None,
) -> PCG:
    """Weights `stored` in chunks, the merged products `both` split so; samples over x."""
    targets = [entry.target for entry in graph.of_kind("parameter")]
    chunks = {name: Storage(axes) for name, axes in (stored or {}).items()}
    parameters = tuple(
        ParameterDecision(name, *[chunks[name]] * 3) for name in targets if name in chunks
    )
    factors = tuple((both or {}).items())
    nodes = tuple(
        NodeDecision(flat.key, factors) for flat in graph.flat() if flat.node.op.startswith("parl")
    )
    decisions = Decisions(one_stage(MESH), nodes, parameters=parameters)
    return verify_pcg(lower(graph, decisions))


def read_in_place(pcg: PCG) -> list[tuple[int, ...]]:
    """What merged products read where it lies, by lowered function."""
    return [
        item.adjacent
        for function in (*pcg.functions, pcg.main)
        for item in function.body
        if isinstance(item, Compute) and item.node.op == "parloom.linears"
    ]


def test_weights_and_biases_of_a_merged_product() -> None:
    pcg = lowered()
    assert pcg.adjacent == ALL
    assert {*read_in_place(pcg)} == {(1, 2)}
    source = generate(pcg, "merged")
    assert "in_place=('weights', 'biases'))" in source
    table = source[source.index("    adjacent=(") :].split("\n    ),")[0]
    assert [line.strip() for line in table.split("\n")[1:]] == [f"{group!r}," for group in ALL]
    assert "  in one memory: 0.w, 0.v" in print_pcg(pcg)


@pytest.mark.parametrize(
    "factors", [{"n0": ("x",)}, {"n3": ("y",), "n1": ("x",)}, {"d0": ("x",), "n0": ("y",)}]
)
def test_shards_of_rows_lie_together(factors: dict[str, tuple[str, ...]]) -> None:
    pcg = lowered(both=factors)
    assert pcg.adjacent == ALL
    assert {*read_in_place(pcg)} == {(1, 2)}


def test_biases_that_count_once_are_made_anew() -> None:
    pcg = lowered(both={"k": ("x",)})
    assert pcg.adjacent == (FIRST, SECOND)
    assert set(read_in_place(pcg)) == {(1,)}
    assert "in_place=('weights',))" in generate(pcg, "merged")


def test_what_is_gathered_together_stands_side_by_side() -> None:
    names = ["0.w", "0.c", "0.v", "0.d", "0.u"]
    pcg = lowered(stored=dict.fromkeys(names, ("x",)))
    assert pcg.adjacent == ALL
    (gather,) = (node for node in step_program(pcg) if node.when == EACH_PASS)
    assert [p.input.target for p in gather.parameters] == ["0.w", "0.v", "0.c", "0.d", "0.u"]


@pytest.mark.parametrize(
    ("graph", "stored", "found"),
    [
        # One of them is frozen, and its call a function of its own.
        (changed(('parameter("1.v", trainable=True)', 'parameter("1.v")')), {},
         (FIRST, *BIASES)),
        # One is stored otherwise; others' chunks and states do not matter.
        (GRAPH, {"0.w": ("x",)}, (BIASES[0], SECOND, BIASES[1])),
        (GRAPH, {"0.w": ("x",), "0.v": ("y",)}, (BIASES[0], SECOND, BIASES[1])),
        (GRAPH, {"0.w": ("x",), "0.v": ("x",)}, ALL),
        # One is gathered for the call that reads it, one that two calls read for main.
        (changed((', v_1, d_1', ', v_0, d_1')), {"0.w": ("x",), "0.v": ("x",)},
         (*BIASES,)),
    ],
)  # fmt: skip
def test_what_differs_lies_apart(
    graph: Graph, stored: dict[str, tuple[str, ...]], found: tuple[tuple[str, ...], ...]
) -> None:
    assert set(lowered(graph, stored).adjacent) == set(found)


def test_a_parameter_is_in_one_memory() -> None:
    """That of the first product that reads it so; the same weights twice are in one."""
    shared = changed((", v_1, d_1", ", v_0, d_1"))
    assert lowered(shared).adjacent == (FIRST, *BIASES)
    both = changed(("](a, w_1, c_1, v_1, d_1, u_1)", "](a, w_0, c_0, v_0, d_0, u_1)"))
    pcg = lowered(both)
    assert pcg.adjacent == (FIRST, BIASES[0])
    assert {*read_in_place(pcg)} == {(1, 2)}
    twice = changed(
        ("input w_1: float32[32", "input w_1: float32[16"),
        (", v_0, d_0", ", w_1, d_0"),
        ("](a, w_1", "](a, w_0"),
    )
    assert lowered(twice).adjacent[0] == ("0.w", "1.w")
    assert ("0.w", "1.v") not in lowered(twice).adjacent


def test_a_weight_that_is_at_home_otherwise_is_moved() -> None:
    """Another reader splits it more: what the merged product reads is made of it."""
    graph = changed(
        ("    b: float32", "    m: float32[8, 16] = linear(a, v_0)  # more\n    b: float32"),
        ('["1"](a,', '["1"](m,'),
    )
    key = next(flat.key for flat in graph.flat() if flat.node.path == "more")
    nodes = (NodeDecision(key, (("n0", ("x",)),)),)
    pcg = verify_pcg(lower(graph, Decisions(one_stage(MESH), nodes)))
    assert FIRST not in pcg.adjacent
    assert sorted(read_in_place(pcg)) == [(1, 2), (2,)]


def test_an_evaluation_program_lays_nothing() -> None:
    homes = {p.input.target: p.layout for p in lowered().parameters}
    pcg = lower(GRAPH, Decisions(one_stage(MESH)), homes=homes)
    assert pcg.adjacent == ()
    assert {*read_in_place(pcg)} == {()}


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((), "0.w, 0.v are read as one and lie in several memories"),
        ((*ALL, FIRST), "0.w lies in several memories"),
        ((*ALL, ("0.x", "0.u")), "0.x is no parameter"),
        ((*ALL, ("0.u", "1.u")), "0.u, 1.u lie in one memory and differ"),
    ],
)
def test_other_groups_are_refused(groups: tuple[tuple[str, ...], ...], said: str) -> None:
    pcg = lowered(stored={"0.u": ("x",)})
    with pytest.raises(VerifyError, match=said):
        verify_pcg(replace(pcg, adjacent=groups))


def without(pcg: PCG) -> PCG:
    """The same program with copies."""

    def apart(function: PFunction) -> PFunction:
        body = tuple(
            replace(i, adjacent=()) if isinstance(i, Compute) else i for i in function.body
        )
        return replace(function, body=body)

    functions = tuple(map(apart, pcg.functions))
    return replace(pcg, functions=functions, main=apart(pcg.main), adjacent=())


@pytest.mark.parametrize("name", ["8xH100", "4xcpu"])
def test_copies_cost_time_and_memory(name: str) -> None:
    """Nothing of either where weights lie together."""
    cluster, pcg = load_cluster(name), lowered()
    found, copied = (priced(own, cluster, pcg.decisions) for own in (pcg, without(pcg)))
    size = 48 * 16 * 4
    kernels = found.walker.kernels
    forward = [own.main.forward.total.price.compute_s for own in (found, copied)]
    assert forward[1] - forward[0] == pytest.approx(2 * kernels.stream_s(2 * size))
    kept = [own.main.forward.net_bytes for own in (found, copied)]
    # Autograd keeps a copy for the gradient of what it multiplies, which the batch has none of.
    assert kept[1] - kept[0] == size


@pytest.mark.parametrize("factors", [{}, {"n0": ("x",)}, {"k": ("y",)}, {"d0": ("x",)}])
def test_copies_are_split_as_the_weights_are(factors: dict[str, tuple[str, ...]]) -> None:
    pcg = without(lowered(both=factors))
    own = lowered(both=factors)
    cluster = load_cluster("4xcpu")
    sizes = [priced(p, cluster, p.decisions).main.forward.net_bytes for p in (own, pcg)]
    parts = 2 if {"n0", "k"} & factors.keys() else 1
    assert sizes[1] - sizes[0] == 48 * 16 * 4 // parts


def test_the_search_prices_what_lowering_decides() -> None:
    """Of weights that are trained alike; copies where they are not."""
    factored = factorize(GRAPH)
    program = program_of(GRAPH, factored)
    index = next(i for i, o in enumerate(program.operators) if o.node.op == "parloom.linears")
    assert program.operators[index].adjacent == (1, 2)
    walker = Walker({}, MESH, load_cluster("4xcpu"))
    prices = Prices(program, walker)
    whole = tuple(State(value.layout) for value in lowered().main.inputs[:1])
    operands = (*whole * 5,)
    choice = Choice((), (), operands, whole * 2)
    alike, apart = (
        prices.operator(index, choice, flags)
        for flags in ((True,) * 5, (True, True, False, True, True))
    )
    assert apart[FORWARD] > alike[FORWARD]
    assert apart[KEPT] - alike[KEPT] == 48 * 16 * 4
