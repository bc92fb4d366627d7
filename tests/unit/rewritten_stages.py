"""Graphs that rewrites are made in, and pipelines of them by hand: stages of one device or of
several, replicas and blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from parloom.cost.clusters import load_cluster
from parloom.cost.measured import Source
from parloom.cost.stages import StagePlayer, simulate_stages
from parloom.ir.factors import factorize
from parloom.ir.graph import FlatNode, Graph
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import Mesh, grid
from parloom.ir.plan import Action, Decisions, ModelSource, NodeDecision, Plan, Stage
from parloom.ir.schedules import STEP
from parloom.ir.stages import stage_items
from parloom.ir.text import parse_graph, print_graph
from parloom.report.case import PipelineCase
from parloom.rewrite.horizontal import fusions
from parloom.rewrite.rewrites import rewritten
from tests.unit.explained import ADAM
from tests.unit.graphs import graph, node

CLUSTER = load_cluster("1x8xV100")


def towers(batch: int = 4096) -> Graph:
    """Two inputs through the same layers, and what is made of both."""
    wide, narrow = (batch, 512), (batch, 256)
    return graph(
        {"up": (512, 256), "down": (256, 512), "first": (256, 256), "head": (2, 256)},
        {"x": (narrow, "float32"), "y": (narrow, "float32")},
        *chain.from_iterable(
            (
                node("linear", own, "first", to=f"{own}0", shape=narrow, path="first", number=at),
                node("tanh", f"{own}0", to=f"{own}1", shape=narrow, path="first", number=at),
                node("linear", f"{own}1", "up", to=f"{own}2", shape=wide, path="up", number=at),
                node("relu", f"{own}2", to=f"{own}3", shape=wide, path="up", number=at),
                node("linear", f"{own}3", "down", to=f"{own}4", shape=narrow, path="d", number=at),
            )
            for at, own in enumerate("xy")
        ),
        node("mul", "x4", "y4", to="both", shape=narrow),
        node("linear", "both", "head", to="z", shape=(batch, 2), path="head"),
        node("sum", "z", to="loss", shape=()),
    )


def fused(made: Graph) -> tuple[str, ...]:
    """Both towers as one."""
    (take,) = (str(own) for own in fusions(made, made.main) if "down" in str(own))
    return (take,)


def split_samples(own: Graph, axis: str = "x") -> Iterator[NodeDecision]:
    """Every operator over its samples."""
    factored = factorize(own)
    for flat in own.flat():
        rule = factored.rule(flat.function, flat.node)
        factor = rule.operands[0][0][-1]
        yield NodeDecision(flat.key, ((factor, (axis,)),))


def halves(own: Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The items of two stages: up to the first nonlinearity of the towers, and from there on."""
    items = stage_items(own)
    ops = {flat.key: flat.node for flat in own.flat()}
    first = [key for key in items if ops[key].op == "tanh"]
    makes = {name for key in first for name in ops[key].refs}
    first += [key for key in items if makes & {value.name for value in ops[key].results}]
    return tuple(k for k in items if k in first), tuple(k for k in items if k not in first)


def on(first: int, count: int) -> tuple[tuple[range, ...], Mesh]:
    """Devices of a stage, with their mesh."""
    return (range(first, first + count),), grid({"x": count}) if count > 1 else Mesh(())


def passes(stage: int, microbatches: Sequence[int]) -> Iterator[Action]:
    for m in microbatches:
        yield Action("F", m, stage)
        yield Action("B", m, stage)


def one_each(own: Graph) -> Decisions:
    a, b = halves(own)
    stages = (Stage(a, *on(0, 1)), Stage(b, *on(1, 1)))
    return Decisions(stages, num_microbatches=4, schedule="1f1b")


def two_each(own: Graph) -> Decisions:
    a, b = halves(own)
    stages = (Stage(a, *on(0, 2)), Stage(b, *on(2, 2)))
    nodes = tuple(split_samples(own))
    return Decisions(stages, nodes, num_microbatches=4, schedule="1f1b")


def unequal(own: Graph) -> Decisions:
    """The first stage on one device, the second one on two."""
    a, b = halves(own)
    stages = (Stage(a, *on(0, 1)), Stage(b, *on(1, 2)))
    nodes = tuple(node for node in split_samples(own) if node.key in b)
    return Decisions(stages, nodes, num_microbatches=4, schedule="1f1b")


def one_stage(own: Graph) -> Decisions:
    stages = (Stage((), *on(0, 2)),)
    return Decisions(stages, tuple(split_samples(own)))


def replicas(own: Graph) -> Decisions:
    """The model on two devices and on one, which run unequal numbers of microbatches."""
    items = stage_items(own)
    stages = (
        Stage(items, *on(0, 2), (0, 1, 2)),
        Stage(items, *on(2, 1), (3,)),
    )
    actions = ((*passes(0, (0, 1, 2)), *STEP), (*passes(1, (3,)), *STEP))
    return Decisions(
        stages, tuple(split_samples(own)), num_microbatches=4, schedule="replicas", actions=actions
    )


def cut_otherwise(own: Graph) -> Decisions:
    """One replica in two stages, the other one in one."""
    a, b = halves(own)
    stages = (
        Stage(a, *on(0, 1), (0, 1)),
        Stage(b, *on(1, 1), (0, 1)),
        Stage(stage_items(own), *on(2, 2), (2, 3)),
    )
    first = (Action("F", 0, 0), Action("F", 1, 0), Action("B", 0, 0), Action("B", 1, 0))
    actions = ((*first, *STEP), (*passes(1, (0, 1)), *STEP), (*passes(2, (2, 3)), *STEP))
    return Decisions(
        stages, tuple(split_samples(own)), num_microbatches=4, schedule="replicas", actions=actions
    )


PLANS: Mapping[str, Callable[[Graph], Decisions]] = {
    own.__name__: own for own in (one_each, two_each, unequal, one_stage, replicas, cut_otherwise)
}


def gated(depth: int = 4) -> Graph:
    """Blocks with two products of one operand."""
    hidden, wide = "float32[4096, 256]", "float32[4096, 512]"
    shapes = {"gate": "[512, 256]", "up": "[512, 256]", "down": "[256, 512]"}
    inputs, calls, before = [], [], "x"
    for i in range(depth):
        own = {f"b{i}_{n}": f'float32{s} = parameter("b.{i}.{n}"' for n, s in shapes.items()}
        inputs += [f"input {n}: {text}, trainable=True)" for n, text in own.items()]
        calls.append(f'    b{i}: {hidden} = block["b.{i}"]({", ".join((before, *own))})')
        before = f"b{i}"
    lines = [
        'graph "Gated" training=True', "", *inputs, f'input x: {hidden} = batch("x")',
        "", "def block(", f"    h: {hidden},",
        *(f"    {n}: float32{s}," for n, s in shapes.items()),
        "):",
        f"    g: {wide} = linear(h, gate)  # gate",
        f"    u: {wide} = linear(h, up)  # up",
        f"    m: {wide} = mul(g, u)  #",
        f"    out: {hidden} = linear(m, down)  # down",
        "    return out", "", "main main:", *calls,
        f"    loss: float32[] = sum({before})  #", "    return loss", "", "loss loss",
    ]  # fmt: skip
    return parse_graph("\n".join(lines) + "\n")


def block_each(own: Graph) -> Decisions:
    """A block on two devices each: those in the middle are equal stages."""
    *blocks, one, last = stage_items(own)
    items = [*((block,) for block in blocks), (one, last)]
    stages = tuple(Stage(keys, *on(2 * at, 2)) for at, keys in enumerate(items))
    nodes = tuple(split_samples(own))
    return Decisions(stages, nodes, num_microbatches=4, schedule="1f1b")


def blocks_in_replicas(own: Graph) -> Decisions:
    """Blocks of a replica in two stages, and of another one in stages that are cut otherwise."""
    items = stage_items(own)
    parts = (items[:1], items[1:], items[:3], items[3:])
    stages = tuple(
        Stage(keys, *on(2 * at, 2 if at < 3 else 1), (0, 1) if at < 2 else (2, 3))
        for at, keys in enumerate(parts)
    )
    actions = []
    for at, microbatches in enumerate(((0, 1), (0, 1), (2, 3), (2, 3))):
        both = [Action(kind, m, at) for kind in "FB" for m in microbatches]
        actions.append((*(passes(at, microbatches) if at % 2 else both), *STEP))
    return Decisions(stages, tuple(split_samples(own)), (), (), 4, "replicas", tuple(actions))


def low_rank(batch: int = 1024) -> Graph:
    """A product of factors, of which the first half is read again."""
    wide, narrow = (batch, 256), (batch, 8)
    return graph(
        {"first": (256, 256), "p": (256, 8), "q": (8, 256), "last": (256, 8)},
        {"x": (wide, "float32")},
        node("linear", "x", "first", to="a", shape=wide, path="first"),
        node("matmul", "a", "p", to="u", shape=narrow),
        node("matmul", "u", "q", to="v", shape=wide, number=1),
        node("relu", "v", to="h", shape=wide),
        node("linear", "u", "last", to="w", shape=wide, path="last"),
        node("mul", "h", "w", to="m", shape=wide),
        node("sum", "m", to="loss", shape=()),
    )


WHOLE = "take v in main by whole: matmul(a, matmul(p, q))"


def two_stages(own: Graph) -> Decisions:
    """All behind the first operator in the second one."""
    first, *rest = stage_items(own)
    stages = (Stage((first,), *on(0, 2)), Stage(tuple(rest), *on(2, 2)))
    return Decisions(stages, (), num_microbatches=4, schedule="1f1b")


def early(own: Graph) -> Decisions:
    """The product and what is made of it in the first stage, the first half of it in the second."""
    first = {"first:linear#0", *(flat.key for flat in own.flat() if makes_early(flat))}
    items = stage_items(own)
    parts = ([key for key in items if (key in first) is here] for here in (True, False))
    stages = (Stage(tuple(a), *on(2 * i, 2)) for i, a in enumerate(parts))
    return Decisions(tuple(stages), (), num_microbatches=4, schedule="1f1b")


def makes_early(flat: FlatNode) -> bool:
    """Whether an operator is one of the whole product, or reads it."""
    names = {value.name for value in flat.node.results}
    return not names.isdisjoint(("v_form", "v", "h")) and "u" not in flat.node.refs


def alone(own: Graph) -> Decisions:
    """The first stage has nothing but what would be gone."""
    factors = [f.key for f in own.flat() if f.node.results[0].name == "v_form"]
    rest = tuple(key for key in stage_items(own) if key not in factors)
    stages = (Stage(tuple(factors), *on(0, 2)), Stage(rest, *on(2, 2)))
    return Decisions(stages, (), num_microbatches=4, schedule="1f1b")


def viewed(batch: int = 1024) -> Graph:
    """A function of parts of a dim, which is one of the whole."""
    wide, parts = (batch, 256), (batch, 2, 128)
    return graph(
        {"first": (256, 256), "last": (256, 256)},
        {"x": (wide, "float32")},
        node("linear", "x", "first", to="a", shape=wide, path="first"),
        node("view", "a", parts, to="b", shape=parts),
        node("relu", "b", to="c", shape=parts),
        node("view", "c", wide, to="d", shape=wide, number=1),
        node("linear", "d", "last", to="e", shape=wide, path="last"),
        node("sum", "e", to="loss", shape=()),
    )


def planned(made: Graph, of: Callable[[Graph], Decisions], *texts: str) -> Decisions:
    """The plan of a graph with these rewrites."""
    return replace(of(rewritten(made, texts)), rewrites=texts)


def pipeline_case(made: Graph, plan: Decisions) -> PipelineCase:
    """A pipeline as `parloom.explain` makes a case of it, without files and torch."""
    source = ModelSource("model.py:build", None, None, None)
    saved = Plan(source, CLUSTER.name, "0" * 16, ADAM, "method", plan, print_graph(made))
    stages = lower_stages(rewritten(made, plan.rewrites), plan)
    played = simulate_stages(stages, CLUSTER, plan, ADAM)
    player = StagePlayer(CLUSTER, ADAM)
    return PipelineCase(saved, CLUSTER, played, Source("spec", 0.25), stages, player)
