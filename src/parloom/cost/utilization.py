"""How well devices are used: floating-point operations of the model against what they could do."""

from collections import Counter
from collections.abc import Iterable

from parloom.ir.factors import factorize, site_of
from parloom.ir.graph import Call, Graph, Node
from parloom.ir.mesh import Device
from parloom.ir.ops import OPS


def model_flops(graph: Graph) -> float:
    """Floating-point operations of a step as the model states it: forward and backward, with
    nothing computed again (as PaLM counts MFU: Chowdhery et al., 2022, appendix B).
    """
    factored, calls = factorize(graph), Counter[str]()
    calls.update(item.function for item in graph.main.body if isinstance(item, Call))
    calls[graph.main.name] = 1
    total = 0.0
    for function in (graph.main, *graph.functions):
        specs = function.specs()
        for node in (item for item in function.body if isinstance(item, Node)):
            op, rule = OPS[node.op], factored.rule(function.name, node)
            passes = 1 + op.backward_ratio * op.differentiable
            total += calls[function.name] * passes * op.flops(site_of(node, specs), rule)
    return total


def utilization(
    graph: Graph, devices: Iterable[tuple[Device, int]], step_s: float, steps: int
) -> float | None:
    """The share of what devices of these types and numbers could do that the model needs (MFU);
    `graph` is one of `steps` equal parts of the step. None where a step takes no time.
    """
    rate = sum(device.rate(main_dtype(graph)) * count for device, count in devices)
    return steps * model_flops(graph) / (step_s * rate) if step_s and rate else None


def main_dtype(graph: Graph) -> str:
    """In which most of the parameters are."""
    sizes = Counter[str]()
    for entry in graph.of_kind("parameter"):
        sizes[entry.value.spec.dtype] += entry.value.spec.num_elements
    return max(sizes, key=lambda dtype: sizes[dtype], default="float32")
