"""The grid of a rule of thumb: legal, as good as all of its points, and cheap to look through."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from parloom.candidates import candidates
from parloom.comparators.baselines import RULES, layouts
from parloom.comparators.configuration import Configuration, cheap_operators, laid_out
from parloom.comparators.drawn import drawn
from parloom.comparators.equal_stages import EqualStages, blocks_of, bubble, in_flight
from parloom.comparators.grid import LEVELS, MOST, Grid, Point, _divided
from parloom.comparators.tensor_parallel import TENSOR
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Call, Graph
from parloom.ir.lower import lower
from parloom.ir.plan import MICROBATCH, Decisions, Optimizer
from parloom.ir.schedules import schedule
from parloom.ir.stages import stage_items
from parloom.ir.text import parse_graph, print_graph
from parloom.ir.verify import verify_decisions, verify_pcg
from parloom.rewrite.pad import paddings
from parloom.rewrite.rewrites import paddings_of
from parloom.search.conflicts import broken
from parloom.search.pinned import resolve
from parloom.search.pins import NO_REWRITE, Pin, parse_pin
from parloom.search.request import AUTO, Request, base_of
from tests.unit.graphs import perceptron, stack

CLUSTER = load_cluster("2x2xA100")
EIGHT = load_cluster("2x4xA100")
# Activations, weights and links each matter.
MODEL = stack(2, batch=16, seq=64, width=256, vocab=512)
# Of the way from the smallest peak to that of the plainest plan.
SHARES = (1.0, 0.5, 0.1)
# How much slower than the best of all points the one that is found may be.
SLACK = {1.0: 1.0, 0.5: 1.1, 0.1: 1.25}


def asked(made: Graph = MODEL, limit: float = 1e12, **other: object) -> Request:
    found = Request(made, DataSheets(CLUSTER), Optimizer("adamw", 2), int(limit))
    return replace(found, **other)  # type: ignore[arg-type]


def grid(rule: str, request: Request, most: int = 10**6) -> Grid:
    return Grid(request, RULES[rule], base_of(request), most)


def every(rule: str, request: Request) -> Iterator[Point]:
    """All points of a grid, simulated one by one."""
    found = grid(rule, request)
    sequences = (True, False) if rule == "megatron" else (False,)
    for sequence, zero, level in product(sequences, RULES[rule].zeros, LEVELS):
        like = Configuration(
            zero=zero, recompute=level, sequence_parallel=sequence, master_dtype=None
        )
        for varied, _ in layouts(RULES[rule], request.graph, CLUSTER, like, found.factored):
            for count in found._counts(varied):
                point = found._point(_divided(varied, count))
                if point is not None:
                    yield point


@cache
def all_points(rule: str) -> tuple[Point, ...]:
    return tuple(every(rule, asked()))


def fastest(points: Iterable[Point], limit: int) -> float:
    return min(p.prediction.step_s for p in points if p.prediction.peak_bytes <= limit)


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("rule", RULES)
def test_the_best_point_is_found_with_few_simulations(rule: str, share: float) -> None:
    points = all_points(rule)
    free = points[0].prediction.peak_bytes
    least = min(p.prediction.peak_bytes for p in points)
    request = asked(limit=least + share * (free - least))
    looked = grid(rule, request, MOST)
    found = list(looked.run())
    assert len([p for p in looked.points.values() if p is not None]) <= min(MOST, len(points) - 1)
    best = fastest(points, request.limit_bytes)
    assert fastest(found, request.limit_bytes) <= SLACK[share] * best


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", RULES)
def test_every_point_is_legal(rule: str) -> None:
    request = asked(stack(2, batch=12, seq=8))
    factored = factorize(request.graph)
    points = list(every(rule, request))
    assert {p.chosen.recompute for p in points} == set(LEVELS)
    assert {p.chosen.num_microbatches for p in points} >= {1, 3}
    for point in points:
        verify_decisions(request.graph, point.decisions, factored)
        verify_pcg(lower(request.graph, point.decisions, factored=factored))
        assert point.decisions.mesh.num_ranks == CLUSTER.num_devices


def pinned_to(graph: Graph, *pins: Pin) -> Request:
    return asked(graph, method="megatron", pinned=resolve(pins, graph, factorize(graph)))


def test_a_vocabulary_is_padded_where_rewrites_may_be_only() -> None:
    made = stack(2, batch=16, seq=8, vocab=257)
    for pins in ((), (parse_pin("rewrite=pad"),), (parse_pin("rewrite=merge_*", forbidden=True),)):
        found = candidates(pinned_to(made, *pins), lambda text: None).found
        assert any(paddings_of(plan.decisions.rewrites) for plan in found)
    for text in (NO_REWRITE, "rewrite=pad", "rewrite=p*d"):
        request = pinned_to(made, parse_pin(text, forbidden=True))
        found = candidates(request, lambda text: None).found
        assert any(TENSOR in plan.decisions.mesh.names for plan in found)
        assert not any(paddings_of(plan.decisions.rewrites) for plan in found)
        padded = replace(found[0].decisions, rewrites=("pad embed.weight 257 258",))
        assert broken(request.pinned, made, padded) == (
            f"--forbid {text}: the plan has such rewrite"
        )


def test_the_search_that_pads_nothing_says_so() -> None:
    made = stack(2, batch=16, seq=8, vocab=257)
    request = replace(pinned_to(made, parse_pin("rewrite=pad")), method=AUTO)
    with pytest.raises(InputError, match="pads no vocabulary; --method megatron does"):
        candidates(request, lambda text: None)


@pytest.mark.parametrize("method", RULES)
@pytest.mark.parametrize("made", [perceptron(batch=12), stack(2, batch=12)])
def test_a_batch_of_twelve_on_eight_devices(method: str, made: Graph) -> None:
    request = asked(made, machine=DataSheets(EIGHT), method=method)
    found = candidates(request, lambda text: None).found
    assert found
    for candidate in found:
        assert candidate.decisions.num_ranks == 8
        assert candidate.prediction is not None
    nodes = [node for candidate in found for node in candidate.decisions.nodes]
    assert any(axes for node in nodes for _, axes in node.factors)


@pytest.mark.parametrize("rule", RULES)
def test_where_nothing_fits_there_is_the_smallest(rule: str) -> None:
    smallest = min(p.prediction.peak_bytes for p in all_points(rule))
    (found,) = grid(rule, asked(limit=1000), MOST).run()
    assert smallest <= found.prediction.peak_bytes <= 1.2 * smallest


def test_what_stands_beside_a_search_is_bounded() -> None:
    looked = grid("megatron", asked(), 2)
    assert list(looked.run())
    assert len(looked.points) <= 2


def test_a_number_of_microbatches_that_is_asked_for_is_kept() -> None:
    found = list(grid("fsdp", asked(num_microbatches=4)).run())
    assert {p.decisions.num_microbatches for p in found} == {4}
    apart = list(grid("fsdp", asked(num_microbatches=4, batch_semantics=MICROBATCH)).run())
    assert {p.decisions.batch_semantics for p in apart} == {MICROBATCH}
    assert {p.chosen.words[1] for p in apart} == {"4 microbatches"}


ATTENTION = """\
graph "Attention" training=True

input wq: float32[8, 8] = parameter("wq", trainable=True)
input wo: float32[8, 8] = parameter("wo", trainable=True)
input x: float32[4, 6, 8] = batch("x")

def block(
    hidden: float32[4, 6, 8],
    wq: float32[8, 8],
    wo: float32[8, 8],
):
    q: float32[4, 6, 8] = linear(hidden, wq)  # q
    k: float32[4, 8, 6] = transpose(q, 1, 2)  #
    scores: float32[4, 6, 6] = matmul(q, k)  #
    shares: float32[4, 6, 6] = softmax(scores, -1)  #
    mixed: float32[4, 6, 8] = matmul(shares, q)  # "" #1
    out: float32[4, 6, 8] = linear(mixed, wo)  # out
    return out

main main:
    y: float32[4, 6, 8] = block["block"](x, wq, wo)
    loss: float32[] = sum(y)  #
    return loss

loss loss
"""


def test_selective_recomputation_makes_scores_again_and_no_product_with_weights() -> None:
    made = parse_graph(ATTENTION)
    (call,) = (item for item in made.main.body if isinstance(item, Call))
    assert cheap_operators(made, call) == (":matmul#0", ":softmax#0", ":matmul#1")


FLAT = """\
graph "Flat" training=True

input up: float32[8, 16] = parameter("up", trainable=True)
input down: float32[16, 8] = parameter("down", trainable=True)
input x: float32[4, 6, 8] = batch("x")

main main:
    twice: float32[4, 6, 8] = mul(x, 2.0)  #
    rows: float32[24, 8] = view(twice, (24, 8))  #
    wide: float32[24, 16] = mm(rows, up)  #
    narrow: float32[24, 8] = mm(wide, down)  # "" #1
    y: float32[4, 6, 8] = view(narrow, (4, 6, 8))  # "" #1
    loss: float32[] = sum(y)  #
    return loss

loss loss
"""


def test_sequence_parallelism_gathers_positions_in_front_of_products_of_flat_rows() -> None:
    chosen = Configuration(tensor=2, data=2, microbatch=2, sequence_parallel=True)
    laid = laid_out(parse_graph(FLAT), chosen, CLUSTER)
    found = {node.key: dict(node.factors) for node in laid.decisions(chosen).nodes}
    assert found[":mul#0"] == {"d0": ("data",), "d1": ("tensor",)}
    assert found[":mm#0"]["n"] == found[":mm#1"]["k"] == ("tensor",)


def test_more_draws_are_no_worse() -> None:
    few = list(drawn(asked(stack(1), budget=2), Decisions()))
    many = list(drawn(asked(stack(1), budget=12), Decisions()))
    assert many[: len(few)] == few
    steps = [plan.prediction.step_s for plan in many]
    assert steps[-1] <= few[-1].prediction.step_s
    assert steps == sorted(steps, reverse=True)
    assert list(drawn(asked(stack(1), budget=12, seed=1), Decisions())) != many


# Pipelines of megatron.

DEEP = stack(4, batch=16, seq=64, width=256, vocab=512)
HOSTS = load_cluster("4x1xcpu")


def pipelines(made: Graph = DEEP, limit: float = 1e12) -> EqualStages:
    """With all layouts of all sizes looked at."""
    request = asked(made, limit, machine=DataSheets(HOSTS))
    like = Configuration(zero=1, master_dtype=None)
    return EqualStages(request, RULES["megatron"], like, LEVELS, 10**6)


def test_stages_have_equally_many_blocks_and_lie_side_by_side() -> None:
    looked = pipelines()
    found = looked.ranked(float("inf"))
    shapes = {(e.chosen.pipeline, e.chosen.interleave) for e in found}
    assert shapes == {(2, 1), (2, 2), (4, 1)}
    for one in found:
        plan = looked.decisions(one.chosen)
        verify_decisions(DEEP, plan, looked.factored)
        keys = [key for stage in plan.stages for key in stage.items]
        assert tuple(keys) == stage_items(DEEP)
        count, size = one.chosen.pipeline, 4 // one.chosen.pipeline
        each = 4 // len(plan.stages)
        for index, stage in enumerate(plan.stages):
            assert sum(key.startswith("blocks.") for key in stage.items) == each
            begin = index % count * size
            assert stage.devices == (range(begin, begin + size),)
        assert any("tokens" in key for key in plan.stages[0].items)
        assert any("head" in key for key in plan.stages[-1].items)


@pytest.mark.parametrize(
    ("depth", "stages", "blocks"),
    [(4, 2, (2, 2)), (6, 4, (1, 2, 2, 1)), (6, 8, None), (5, 2, None), (2, 4, None), (0, 2, None)],
)
def test_blocks_that_divide(depth: int, stages: int, blocks: tuple[int, ...] | None) -> None:
    made = stack(depth) if depth else perceptron(batch=12)
    assert blocks_of(made, stages) == blocks


def test_a_model_without_blocks_has_no_pipelines() -> None:
    found = grid("megatron", asked(perceptron(batch=12), machine=DataSheets(HOSTS)))
    assert all(point.chosen.pipeline == 1 for point in found.run())
    assert pipelines(perceptron(batch=12)).ranked(float("inf")) == []


@pytest.mark.parametrize(("ranks", "chunks", "count"), [(2, 1, 1), (4, 1, 8), (4, 2, 8), (4, 4, 4)])
def test_the_closed_forms_are_those_of_the_schedule(ranks: int, chunks: int, count: int) -> None:
    """Passes that take one unit each: what the first rank holds, and how long it takes."""
    chosen = Configuration(pipeline=ranks, interleave=chunks, num_microbatches=count)
    lists = schedule(chosen.schedule_name, ranks * chunks, count, chunks)
    held = most = 0
    for action in lists[0]:
        held += {"F": 1, "B": -1}.get(action.kind, 0)
        most = max(most, held)
    assert in_flight(chosen) == most / (ranks * chunks)
    assert bubble(chosen, 1 / ranks) == pytest.approx(1 + (ranks - 1) / (chunks * count))


def test_pipelines_make_no_plan_slower() -> None:
    """On links that are slow a pipeline is far faster; it is the plan that its estimate said."""
    rule = RULES["megatron"]
    for made, cluster in ((DEEP, HOSTS), (DEEP, CLUSTER), (MODEL, CLUSTER)):
        request = asked(made, machine=DataSheets(cluster))
        whole = list(Grid(request, replace(rule, stages=False), base_of(request), MOST).run())
        found = list(grid("megatron", request, MOST).run())
        limit = request.limit_bytes
        assert fastest(found, limit) <= fastest(whole, limit)
        assert all(point.chosen.pipeline == 1 for point in whole)
        if cluster is HOSTS:
            assert found[-1].chosen.pipeline > 1
            assert fastest(found, limit) < 0.8 * fastest(whole, limit)
            assert request.predict(found[-1].decisions) == found[-1].prediction


def test_pipelines_are_few_of_the_simulations() -> None:
    looked = grid("megatron", asked(DEEP, machine=DataSheets(HOSTS)), 8)
    assert list(looked.run())
    assert sum(chosen.pipeline > 1 for chosen in looked.points) <= 2
    assert looked.pipelines is not None
    assert len(looked.pipelines.whole) <= 4


def test_padded_rows_are_for_tensor_cores() -> None:
    """Of half precision, on several ranks each of which has a multiple of 16 bytes."""
    half = parse_graph(print_graph(stack(1, vocab=66)).replace("float32", "bfloat16"))
    assert {p.padded for p in paddings(half, 2)} == {80}
    assert not paddings(half, 1)
    assert not paddings(stack(1, vocab=66), 2)
    assert {p.padded for p in paddings(stack(1, vocab=63), 2)} == {64}
