"""Experts by all_to_all: tokens travel to the ranks that have their experts, and back."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from parloom import runtime as rt
from parloom import zoo
from parloom.capture import capture
from parloom.comparators.baselines import METHODS
from parloom.cost.clusters import resolve_cluster
from parloom.cost.shares import shares
from parloom.cost.step import priced
from parloom.cost.works import Work
from parloom.execute.ranks import fork_ranks
from parloom.ir.factors import factorize
from parloom.ir.graph import Call, Graph, Node, widened
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.ops.experts import NAME
from parloom.ir.pcg import PCG, Movement
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    NodeDecision,
    Optimizer,
    ParameterDecision,
    Storage,
    one_stage,
)
from parloom.ir.verify import verify_pcg
from parloom.report.words import routing_words
from parloom.runtime import experts
from parloom.runtime.sharding import Digit, Dims, global_shape
from parloom.search.choices import assignments
from parloom.search.evaluation import evaluation_decisions
from parloom.search.folding import program_of
from parloom.search.microbatch import microbatch_of
from tests.capture.test_experts import built, mixtures, subject
from tests.dist import lowered
from tests.equality import TOLERANCE

torch.set_num_threads(1)

WIDTH, INNER = 3, 4
PARTS = ("parloom.dispatch", "parloom.collect")


# The runtime against a dense oracle: random routings, sizes, axes and orders of digits.


@dataclass(frozen=True)
class Routing:
    """Tokens and experts on `axes` of a mesh, and a choice of experts for every token."""

    sizes: dict[str, int]
    axes: tuple[str, ...]
    tokens: tuple[Digit, ...]
    experts: tuple[Digit, ...]
    index: Tensor

    @property
    def total(self) -> int:
        return global_shape((self.experts,), rt.grid(self.sizes))[0]


def _digits(draw: torch.Generator, sizes: dict[str, int], axes: list[str]) -> tuple[Digit, ...]:
    """The axes in any order, with local digits between them."""
    order = torch.randperm(len(axes), generator=draw).tolist()
    found: list[Digit] = []
    for axis in (axes[i] for i in order):
        found += [2] * int(torch.randint(2, (), generator=draw)) + [axis]
    return (*found, 2)


def routing(seed: int) -> Routing:
    """Some are even, some leave experts without a token, some send all to one expert."""
    draw = torch.Generator().manual_seed(seed)
    axes = [("x",), ("y",), ("x", "y"), ("y", "x")][seed % 4]
    sizes = {"x": 2, "y": 3 if seed % 3 else 2}
    other = [a for a in ("x", "y") if a not in axes]
    on = int(torch.randint(3, (), generator=draw))  # where the other axis is
    tokens = _digits(draw, sizes, [*axes, *(other if on == 1 else [])])
    there = _digits(draw, sizes, [*axes, *(other if on == 2 else [])])
    mesh = rt.grid(sizes)
    count, total = (global_shape((d,), mesh)[0] for d in (tokens, there))
    busy = (total, total, 2, 1)[int(torch.randint(4, (), generator=draw))]
    first = int(torch.randint(total - busy + 1, (), generator=draw))
    index = first + torch.randint(busy, (count, 1 + seed % 2), generator=draw)
    return Routing(sizes, axes, tokens, there, index)


def tensors(case: Routing, seed: int) -> list[Tensor]:
    """Tokens, weights of slots, matrices of experts, and the gradient of the result."""
    draw = torch.Generator().manual_seed(seed)
    count, slots = case.index.shape
    shapes = (count, WIDTH), (count, slots), (case.total, WIDTH, INNER), (count, INNER)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def dense(case: Routing, given: list[Tensor]) -> list[Tensor]:
    """The result and the gradients, each token times the matrices of its experts."""
    tokens, weights, matrices = (t.clone().requires_grad_() for t in given[:3])
    made = torch.einsum("tk,tskn,ts->tn", tokens, matrices[case.index], weights)
    torch.autograd.backward(made, given[3])
    return [made.detach(), *(t.grad for t in (tokens, weights, matrices) if t.grad is not None)]


def dims_of(case: Routing) -> tuple[Dims, ...]:
    """Digits of the result, of tokens, of weights of slots, of matrices."""
    slots = case.index.shape[1]
    return (
        (case.tokens, (INNER,)),
        (case.tokens, (WIDTH,)),
        (case.tokens, (slots,) if slots > 1 else ()),
        (case.experts, (WIDTH,), (INNER,)),
    )


def on_rank(comm: rt.Comm, case: Routing, given: list[Tensor]) -> list[Tensor]:
    """One rank's result and gradients."""
    ctx = rt.Context(comm)
    made, *leaves, tables = dims_of(case)

    def mine(full: Tensor, dims: Dims) -> Tensor:
        return rt.take(full, dims, ctx.mesh, ctx.coordinates).clone()

    tokens, weights, matrices = (
        mine(full, dims).requires_grad_()
        for full, dims in zip(given[:3], (*leaves, tables), strict=True)
    )
    own = mine(torch.arange(case.total), (case.experts,))
    index, ends = mine(case.index, leaves[1]), (case.tokens, case.experts, case.axes)
    sent, places = rt.route(tokens, index, ctx, *ends)
    assert (places.diff() > 0).all(), "rows are sorted by expert and token"
    back = rt.grouped_mm(sent, matrices, places, own, case.index.numel())
    result = rt.unroute(back, places, weights, index, ctx, *ends)
    torch.autograd.backward(result, mine(given[3], made))
    gradients = (t.grad for t in (tokens, weights, matrices) if t.grad is not None)
    return [result.detach(), *gradients]


def together(case: Routing, found: list[list[Tensor]]) -> list[Tensor]:
    """The results of all ranks as whole tensors."""
    mesh = rt.grid(case.sizes)
    return [_whole([r[i] for r in found], dims, mesh) for i, dims in enumerate(dims_of(case))]


def routed(case: Routing, given: list[Tensor]) -> list[Tensor]:
    """The same on all ranks of the mesh, put together again."""
    found = rt.run_threads(rt.grid(case.sizes), lambda comm: on_rank(comm, case, given))
    return together(case, found)


def _whole(pieces: list[Tensor], dims: Dims, mesh: rt.Mesh) -> Tensor:
    """The sum of the shards over axes that shard something, once over all others.

    An axis beside those of the route shards either tokens or experts: what it does not shard is a
    partial sum over it; over an axis that shards neither, all ranks have the same.
    """
    total = torch.zeros(global_shape(dims, mesh), dtype=torch.float64)
    for rank, piece in enumerate(pieces):
        part = torch.zeros_like(total)
        rt.put(part, piece, dims, mesh, mesh.coordinates(rank))
        total += part
    return total


def scale(case: Routing) -> int:
    """How often every addend is in the sum over all ranks: over axes that shard neither side."""
    mesh, lie = rt.grid(case.sizes), {*case.tokens, *case.experts}
    return mesh.num_ranks // prod([mesh[a].size for a in case.sizes if a in lie])


@pytest.mark.parametrize("seed", range(48))
def test_any_routing_is_exact(seed: int) -> None:
    case = routing(seed)
    given = tensors(case, seed)
    for ours, wanted in zip(routed(case, given), dense(case, given), strict=True):
        torch.testing.assert_close(ours / scale(case), wanted, rtol=0, atol=1e-12)


def in_process(case: Routing, given: list[Tensor]) -> list[Tensor]:
    return on_rank(rt.DistributedComm(rt.grid(case.sizes), (case.axes,)), case, given)


def test_processes_send_any_numbers() -> None:
    """Over gloo, in another order than that of ranks: all rows to one expert, none to others."""
    case = Routing(
        {"x": 2, "y": 2}, ("y", "x"), ("x", 2, "y"), ("y", 2, "x"), torch.full((8, 2), 5)
    )
    given = tensors(case, 0)
    found = together(case, fork_ranks(4, in_process, case, given))
    for ours, wanted in zip(found, dense(case, given), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


def _stay(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    like, _, _ = ctx.saved_tensors
    return grad.new_ones(len(like), grad.shape[1]), None, None, None, None


def _other_rows(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _, sent, received = ctx.saved_tensors
    return experts._exchange(grad.flip(0), received, sent, ctx.group), None, None, None, None


@pytest.mark.parametrize("wrong", [_stay, _other_rows])
def test_a_wrong_adjoint_is_caught(
    wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of rows come back from the ranks that have the rows, in their order."""
    monkeypatch.setattr(experts._Send, "backward", staticmethod(wrong))
    case = routing(1)
    given = tensors(case, 1)
    pairs = zip(routed(case, given), dense(case, given), strict=True)
    assert max(float((a / scale(case) - b).abs().max()) for a, b in pairs) > 1e-3


# Plans: samples and experts on one axis.


def over_data(graph: Graph, microbatches: int = 1) -> Decisions:
    """Data parallel on four ranks, experts over all of them."""
    (plan,) = METHODS["data_parallel"](graph, resolve_cluster("4xcpu").cluster, microbatches, 0)
    return lowered.routed(graph, plan, ("data",))


def crossed(graph: Graph) -> Decisions:
    """Samples over both axes of 2 x 2, experts over the inner one, their states over the outer."""
    (plan,) = METHODS["data_parallel"](graph, resolve_cluster("2x2xcpu").cluster, 1, 0)
    mesh = grid({"x": 2, "y": 2})
    nodes = tuple(
        replace(n, factors=tuple((f, ("x", "y") if axes else ()) for f, axes in n.factors))
        for n in plan.nodes
    )
    plan = lowered.routed(graph, Decisions(one_stage(mesh), nodes), ("y",))
    over, both = Storage(("x",), 0), Storage(("x", "y"), 0)
    stored = (
        ParameterDecision(p.input.target, *((over,) if p.layout.axes else (both,)) * 3)
        for p in lower(graph, plan).parameters
        if p.input.value.spec.shape
    )
    return replace(plan, parameters=tuple(stored))


def moved(pcg: PCG) -> set[str]:
    bodies = (f.body for f in (pcg.main, *pcg.functions))
    return {item.step.row for body in bodies for item in body if isinstance(item, Movement)}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("plan", [over_data, crossed])
def test_models_are_equal(name: str, plan: Callable[[Graph], Decisions]) -> None:
    """No movement beside the route, and gradients of experts are whole over its axis."""
    model = subject(name)
    decisions = plan(model.graph)
    pcg = verify_pcg(lower(model.graph, decisions, factored=model.factored))
    assert not moved(pcg) & {"combine", "combine_varying", "reduce_scatter"}
    axes = {"data"} if plan is over_data else {"y"}
    found = {p.input.target: p for p in pcg.parameters if ".experts." in p.input.target}
    assert len(found) == 2 * len(mixtures(model.graph))
    for parameter in found.values():
        assert {*parameter.layout.axes} == axes
        assert not axes & {*parameter.reduce}
    error, where = model.error(decisions)
    assert error <= TOLERANCE, where


GSHARD = {"einsum#1": "e", "relu#0": "d0", "einsum#2": "e"}  # experts' dim, by operator


def test_dense_dispatch_goes_by_all_to_all() -> None:
    """GShard's buffers have a dim for experts, padded to their capacity: movements as of any value
    take them from groups to experts and back.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"seq": 8, "vocab": 24, "width": 12, "heads": 2, "head_width": 6}
    model = lowered.of(*zoo.build("gshard", batch=4, depth=2, inner=24, experts=4, **sizes))
    (plan,) = METHODS["data_parallel"](model.graph, resolve_cluster("4xcpu").cluster, 1, 0)
    factors = {f"blocks.1.experts:{key}": factor for key, factor in GSHARD.items()}
    nodes = (
        NodeDecision(n.key, ((factors[n.key], ("data",)),)) if n.key in factors else n
        for n in plan.nodes
    )
    plan = replace(plan, nodes=tuple(nodes))
    pcg = verify_pcg(lower(model.graph, plan, factored=model.factored))
    assert "all_to_all" in moved(pcg)
    found = [p for p in pcg.parameters if p.input.target.endswith(("experts.up", "experts.down"))]
    assert [(p.layout.axes, p.reduce) for p in found] == [(("data",), ())] * 2
    error, where = model.error(plan)
    assert error <= TOLERANCE, where


@pytest.mark.parametrize("how", ["microbatches", "recompute", "values"])
def test_steps_in_parts_are_equal(how: str) -> None:
    """Rows are routed anew for every microbatch, and where activations are made again."""
    model = subject("mixtral" if how != "microbatches" else "deepseek_v3")
    plan = over_data(model.graph, 3 if how == "microbatches" else 1)
    calls = [item for item in model.graph.main.body if isinstance(item, Call)]
    if how == "recompute":
        again = tuple(ActivationDecision(call.prefix, "recompute") for call in calls)
        plan = replace(plan, activations=again)
    elif how == "values":
        (key,) = {
            item.key
            for call in calls
            for item in model.graph.by_name[call.function].body
            if isinstance(item, Node) and item.op == NAME
        }
        again = tuple(ActivationDecision(call.prefix, "recompute", (key,)) for call in calls)
        plan = replace(plan, activations=again)
    verify_pcg(lower(model.graph, plan, factored=model.factored))
    error, where = model.error(plan)
    assert error <= TOLERANCE, where


def test_evaluation_routes_as_training_does() -> None:
    model = subject("deepseek_v3")
    module, batch = built("deepseek_v3")
    graph = widened(capture(module, batch, training=False))
    training = lower(model.graph, over_data(model.graph), factored=model.factored)
    found = evaluation_decisions(graph, factorize(graph), training, model.factored, 1)
    (key,) = mixtures(graph)
    (node,) = (n for n in found.nodes if n.key == key)
    assert dict(node.factors) == {"e": ("data",), "t00": ("data",)}


# Prices.


def test_routing_costs_what_it_sends() -> None:
    """Forward and backward each send the rows of a rank there and back."""
    model = subject("mixtral")
    cluster = resolve_cluster("4xcpu").cluster
    plan = over_data(model.graph)
    pcg = lower(model.graph, plan, factored=model.factored)
    found = priced(pcg, cluster, plan, Optimizer("sgd"))
    (function,) = pcg.functions
    works = [
        [w for w in track.works if isinstance(w, Work) and w.kind in PARTS]
        for walked in [found.walker.call(function.name)]
        for track in (walked.forward, walked.backward)
    ]
    each = 144 // 4 * 2 * 24 * 8  # tokens of a rank x slots x width x bytes
    for forward in works[0]:
        assert forward.exchange is not None
        sent = sum(size for _, size, _ in forward.exchange.traffic)
        places = 144 // 4 * 2 * 8 if forward.kind == PARTS[0] else 0
        assert sent == pytest.approx((each + places) * 3 / 4)
    for backward in works[1]:
        assert backward.exchange is not None
        assert sum(size for _, size, _ in backward.exchange.traffic) == pytest.approx(each * 3 / 4)
    assert [len(some) for some in works] == [2, 2]
    listed = shares(pcg, found.walker)[function.name]
    routes = [share for share in listed if share.moves == ("route", ("data",))]
    assert [share.forward and share.forward.compute_s for share in routes] == [0.0, 0.0]
    for share, forward in zip(routes, works[0], strict=True):
        assert share.forward is not None
        assert share.forward.exchange == forward.exchange


@pytest.mark.parametrize("count", [1, 3])
def test_the_search_may_route(count: int) -> None:
    """Of the choices on two axes some route over one or both, for microbatches, too."""
    model = subject("deepseek_v3")
    program = microbatch_of(program_of(model.graph, model.factored), count)
    assert program is not None
    (operator,) = (o for o in program.operators if o.node.op == NAME)
    mesh = grid({"x": 2, "y": 2})
    every = list(assignments(operator.rule, mesh))
    assert {operator.rule.routed(chosen, mesh) for chosen in every} == {
        (), ("x",), ("y",), ("x", "y"),
    }  # fmt: skip
    for chosen in every:
        operator.rule.check(chosen, mesh, "here")


def test_balance_is_assumed_where_there_are_experts() -> None:
    (line,) = routing_words(subject("mixtral").graph)
    assert "equally often" in line
    assert not routing_words(lowered.model("mlp").graph)
