"""Plans all of whose gradients and gathered weights travel in int8."""

from collections.abc import Sequence
from dataclasses import replace

from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.plan import Decisions, ParameterDecision
from parloom.ir.step_program import as_sent
from parloom.quantization import INT8, REAL
from parloom.rewrite.rewrites import rewritten
from parloom.search.request import Request, ScoredPlan


def in_int8(decisions: Decisions, graph: Graph) -> Decisions:
    """The same with all that may be quantized of the parameters of `graph`."""
    known = {found.name: found for found in decisions.parameters}
    for entry in graph.of_kind("parameter"):
        if entry.value.spec.dtype in REAL:
            own = known.get(entry.target, ParameterDecision(entry.target))
            known[entry.target] = replace(
                own,
                weight_sent=INT8 if own.weight.axes else "",
                gradient_sent=INT8 if entry.trainable else "",
            )
    return replace(decisions, parameters=tuple(known.values()))


def faster_in_int8(request: Request, found: Sequence[ScoredPlan]) -> list[ScoredPlan]:
    """The plans of one stage with gradients and weights in int8, where they are faster for it."""
    faster = []
    for plan in found:
        own = plan.decisions
        if len(own.stages) > 1 or own.num_ranks == 1 or own.sent_dtypes:
            continue
        graph = rewritten(request.graph, own.rewrites)
        decisions = as_sent(lower(graph, in_int8(own, graph)))
        if not decisions.sent_dtypes:
            continue
        prediction = request.on(own.num_ranks).predict(decisions)
        if prediction.step_s < plan.prediction.step_s:
            name = f"{plan.name}, {INT8}"
            faster.append(replace(plan, decisions=decisions, prediction=prediction, name=name))
    return faster
