"""Which tensors hold the memory of a device: parameters with their states, and kept activations."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from parloom.cost.liveness import Lives, own_of
from parloom.cost.step import Priced
from parloom.ir.pcg import PCG, Movement, PCall, PFunction, results_of

MOVED = " (redistributed)"


@dataclass(frozen=True, slots=True)
class Holding:
    """`count` tensors that are held alike, `num_bytes` together, of a component (`COMPONENTS`)."""

    component: str
    name: str
    count: int
    num_bytes: int


def holdings(pcg: PCG, found: Priced) -> tuple[Holding, ...]:
    """What is stored between steps, and kept from the forward to the backward pass, the largest
    first; equal tensors of the calls of a block kind stand together.
    """
    every = [*_parameters(pcg, found), *_activations(pcg, found)]
    return tuple(sorted(every, key=lambda h: (-h.num_bytes, h.component, h.name)))


def _parameters(pcg: PCG, found: Priced) -> Iterator[Holding]:
    """Parameters of blocks by their names inside the block."""
    parameters = found.parameters
    prefixes = [item.prefix for item in pcg.main.body if isinstance(item, PCall)]
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for parameter in pcg.parameters:
        name = parameter.input.target
        prefix = next((p for p in prefixes if name.startswith(f"{p}.")), "")
        name = f"*{name.removeprefix(prefix)}" if prefix else name
        for component, size in parameters.stored_of(parameter).items():
            if size:
                counts[component, name] += 1
                sizes[component, name] += size
    for (component, name), count in counts.items():
        yield Holding(component, name, count, sizes[component, name])


def _activations(pcg: PCG, found: Priced) -> Iterator[Holding]:
    calls: Counter[str] = Counter(
        item.function for item in pcg.main.body if isinstance(item, PCall) and item.policy == "keep"
    )
    calls[pcg.main.name] = 1
    functions = {function.name: function for function in (pcg.main, *pcg.functions)}
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name, count in calls.items():
        function = functions[name]
        where = "" if function is pcg.main else f"{function.kind}: "
        for what, size in _kept(function, pcg, found):
            counts[f"{where}{what}"] += count
            sizes[f"{where}{what}"] += size * count
    for what, count in counts.items():
        yield Holding("activations", what, count, sizes[what])


def _kept(function: PFunction, pcg: PCG, found: Priced) -> Iterator[tuple[str, int]]:
    """What a function makes and autograd keeps, with its bytes."""
    outside = frozenset(value.name for value in function.inputs)
    lives = Lives(outside, frozenset())
    body = tuple(item for item in function.body if not isinstance(item, PCall))
    found.walker.walk(function.inputs, body, lives, function.outputs, function.remake)
    makers = _makers(function)
    for owner in lives.kept:
        if owner not in outside and lives.sizes.get(owner):
            yield makers.get(owner, owner), lives.sizes[owner]


def _makers(function: PFunction) -> dict[str, str]:
    """What makes each value of a function, in the user's words."""
    found: dict[str, str] = {}
    for item in function.body:
        if isinstance(item, Movement):
            source = item.operand.name
            made = f"{found.get(source, source).removesuffix(MOVED)}{MOVED}"
        elif isinstance(item, PCall):
            made = item.prefix
        else:
            made = item.node.key
            if item.results:
                found[own_of(item.results[0])] = f"{made} (for backward)"
        found |= {value.name: made for value in results_of(item)}
    return found
