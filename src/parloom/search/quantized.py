"""Plans all of whose gradients and gathered weights travel in int8."""

from dataclasses import replace

from parloom.ir.graph import Graph
from parloom.ir.plan import Decisions, ParameterDecision
from parloom.quantization import INT8, REAL


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
