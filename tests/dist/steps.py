"""Step programs of hand-written programs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from parloom import runtime as rt

Axes = tuple[str, ...]
BUCKET_BYTES = 1 << 20
PASSES = "forward and backward"


def program(
    parameters: Sequence[rt.ParameterSpec],
    reduce: Mapping[str, Axes],
    units: Mapping[str, tuple[str, ...]],
) -> tuple[rt.StepNode, ...]:
    """The nodes for gradients that are partial over `reduce`, by parameter name."""
    specs = {spec.name: spec for spec in parameters}
    unit_of = {name: unit for unit, names in units.items() for name in names}
    gathers: list[rt.StepNode] = []
    scatters: list[rt.StepNode] = []
    reductions: list[rt.StepNode] = []
    publications: list[rt.StepNode] = []
    for unit, names in units.items():
        for name in names:
            axes = specs[name].storage.weight
            if axes:
                node = rt.StepNode("GATHER", "all_gather", axes, (name,), PASSES, unit)
                gathers.append(node)
    for name, spec in specs.items():
        if not spec.trainable:
            continue
        stored = spec.storage
        unit_or_none = unit_of[name] if stored.weight else None
        size = 0 if stored.weight else BUCKET_BYTES
        gradient, state = stored.gradient, stored.optimizer
        each = tuple(a for a in gradient if a in reduce[name])
        once = tuple(a for a in state[len(gradient) :] if a in reduce[name])
        rest = tuple(a for a in reduce[name] if a not in state)
        for kind, axes, when, found in (
            ("reduce_scatter", each, "microbatch", scatters),
            ("reduce_scatter", once, "step", scatters),
            ("all_reduce", rest, "step", reductions),
        ):
            if axes:
                found.append(rt.StepNode("REDUCE", kind, axes, (name,), when, unit_or_none, size))
        apart = state[len(stored.weight) :]
        if apart:
            node = rt.StepNode("GATHER", "all_gather", apart, (name,), bucket_bytes=size)
            publications.append(node)
    ends = [rt.StepNode("STEP", "gradient_norm", ()), rt.StepNode("STEP", "update", ())]
    scatters.sort(key=lambda node: node.when)  # those of a microbatch first
    nodes = [gathers, scatters, reductions, ends, publications]
    return tuple(n for part in nodes for n in _merged(part))


def _merged(nodes: list[rt.StepNode]) -> list[rt.StepNode]:
    """Nodes that differ in nothing but their parameters, as one."""
    found: dict[rt.StepNode, tuple[str, ...]] = {}
    for node in nodes:
        key = replace(node, parameters=())
        found[key] = (*found.get(key, ()), *node.parameters)
    return [replace(key, parameters=names) for key, names in found.items()]
