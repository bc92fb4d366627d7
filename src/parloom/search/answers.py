"""Plans for answers: a program of prompts and one of each token after them, on the same weights.

Either program is searched alone; for every plan that is found the other program is laid out as that
one is, where both have an operator (`search.evaluation`), with weights and caches where they lie.
An answer takes a pass of the one and as many of the other as there are tokens after the first, so
that the sum of both programs' bounds is one of all such pairs.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from parloom.errors import LayoutError
from parloom.ir.expected import Prediction
from parloom.ir.factors import factorize
from parloom.ir.graph import CACHE, DTYPE_BYTES, Graph
from parloom.ir.layout import local_shape
from parloom.ir.lower_stages import LoweredStages, lower_beside, lower_stages, stages_beside
from parloom.ir.pcg import PCG, TIME, PValue
from parloom.ir.plan import Decisions, NodeDecision
from parloom.rewrite.rewrites import as_stored, rewritten
from parloom.search.evaluation import evaluation_decisions
from parloom.search.request import Request, ScoredPlan


@dataclass(frozen=True, slots=True)
class Pair:
    """A plan of both programs: decisions and expected pass of the decoding one, and of prompts'."""

    found: ScoredPlan
    prefill: Decisions
    expected: Prediction
    cache_bytes: int


def pair_of(found: ScoredPlan, decode: Request, prefill: Request) -> Pair:
    """The pair that a plan of the decoding program makes.

    Raises `LayoutError` where prompts have no program for it.
    """
    first = _lowered(decode.graph, found.decisions)
    graph = as_stored(prefill.graph, found.decisions.rewrites)
    other = decided_beside(graph, found.decisions, first)
    expected = _expected(prefill, lower_beside(graph, other, first), other)
    return Pair(found, other, expected, cache_bytes_of(first, found.decisions))


def pair_from_prefill(found: ScoredPlan, decode: Request, prefill: Request) -> Pair:
    """The pair that a plan of the program of prompts makes, whose rewrites it leaves out."""
    if len(found.decisions.stages) > 1:
        raise LayoutError("of pipelines, those of the program of tokens are looked at")
    prompts = replace(found.decisions, rewrites=(), activations=())
    own = decided_beside(decode.graph, prompts, _lowered(prefill.graph, prompts))
    first = _lowered(decode.graph, own)
    made = lower_beside(prefill.graph, prompts, first)
    scored = replace(found, decisions=own, prediction=decode.placed(own))
    return Pair(scored, prompts, _expected(prefill, made, prompts), cache_bytes_of(first, own))


def decided_beside(graph: Graph, decisions: Decisions, first: LoweredStages) -> Decisions:
    """Decisions about another program of a plan that are like those about the one that `first`
    is: what several stages compute is split where all of them split it alike.
    """
    plain, factored = replace(decisions, activations=(), rewrites=()), factorize(graph)
    if len(decisions.stages) == 1:
        count, pcg = decisions.num_microbatches, first.only
        found = evaluation_decisions(graph, factored, pcg, factorize(pcg.graph), count)
        return replace(plain, nodes=found.nodes)
    parts, chosen = stages_beside(graph, replace(plain, nodes=()), first, factored)
    nodes: dict[str, NodeDecision] = {}
    several: set[str] = set()
    for own, decided, pcg in zip(parts.graphs, chosen, first.pcgs, strict=True):
        count = decided.num_microbatches
        made = evaluation_decisions(own, factorize(own), pcg, factorize(pcg.graph), count)
        split = {node.key: node for node in made.nodes}
        for flat in own.flat():
            node = split.get(flat.key, NodeDecision(flat.key))
            if nodes.setdefault(flat.key, node) != node:
                several.add(flat.key)
    kept = (node for key, node in nodes.items() if node.factors and key not in several)
    return replace(plain, nodes=tuple(kept))


def _lowered(graph: Graph, decisions: Decisions) -> LoweredStages:
    return lower_stages(rewritten(graph, decisions.rewrites), decisions)


def _expected(request: Request, made: LoweredStages, decisions: Decisions) -> Prediction:
    machine = request.machine.used_by(decisions)
    if len(made.pcgs) == 1:
        found = machine.predict(made.only, decisions, request.optimizer)
        return request.by_type(found, decisions)
    return machine.predict_stages(made, decisions, request.optimizer)


def cache_bytes_of(made: LoweredStages, decisions: Decisions) -> int:
    """Bytes of all caches on the device that has most."""
    held = Counter[int]()
    for pcg, stage in zip(made.pcgs, decisions.stages, strict=True):
        inputs = zip(pcg.graph.inputs, pcg.main.inputs, strict=True)
        size = sum(_local_bytes(value, pcg) for entry, value in inputs if entry.kind == CACHE)
        held.update({rank: size for some in stage.devices for rank in some})
    return max(held.values(), default=0)


def _local_bytes(value: PValue, pcg: PCG) -> int:
    """A cache of all microbatches on one device."""
    shape = local_shape(value.layout, value.spec.shape, pcg.mesh)
    times = pcg.num_microbatches if value.layout.shard(TIME) else 1
    return prod(shape) * DTYPE_BYTES[value.spec.dtype] * times


def pairs(
    decoding: tuple[ScoredPlan, ...],
    prompting: tuple[ScoredPlan, ...],
    decode: Request,
    prefill: Request,
) -> Iterator[Pair | str]:
    """All pairs of plans that were found, and why others are none."""
    for plans, make in ((decoding, pair_of), (prompting, pair_from_prefill)):
        for plan in plans:
            try:
                yield make(plan, decode, prefill)
            except LayoutError as error:
                yield f"{plan.name}: {error}"
