"""How well devices are used: floating-point operations of the model against what they could do."""

from collections import Counter
from collections.abc import Iterable

from parloom.cost.kernels import PRODUCTS
from parloom.ir.factors import factorize, site_of
from parloom.ir.graph import Graph
from parloom.ir.mesh import Device
from parloom.ir.ops import OPS


def model_flops(graph: Graph) -> float:
    """Floating-point operations of a step as the model states it: forward and backward, with
    nothing computed again (as PaLM counts MFU: Chowdhery et al., 2022, appendix B). Gradients that
    nothing trained needs, as those of frozen weights, are none of it.
    """
    factored, functions = factorize(graph), {f.name: f for f in (graph.main, *graph.functions)}
    specs = {name: function.specs() for name, function in functions.items()}
    forward: dict[tuple[str, str], float] = {}
    trained = {entry.value.name for entry in graph.of_kind("parameter") if entry.trainable}
    total = 0.0
    for flat in graph.flat():
        node, op, at = flat.node, OPS[flat.node.op], (flat.function, flat.node.key)
        if at not in forward:
            rule = factored.rule(flat.function, node)
            forward[at] = op.flops(site_of(node, specs[flat.function]), rule)
        needed = [name in trained for name in flat.operands]
        backward = 0.0
        if op.differentiable and any(needed):
            trained.update(
                name
                for i, (name, made) in enumerate(zip(flat.results, node.results, strict=True))
                if made.spec.is_float and i not in op.detached
            )
            factors = PRODUCTS.get(node.op)  # half of its backward pass for each of the two
            share = sum(needed[i] for i in factors) / len(factors) if factors else 1.0
            backward = op.backward_ratio * share
        total += (1 + backward) * forward[at]
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
