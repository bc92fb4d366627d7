"""Which values of a program lie in memory from pass to pass, and how many bytes they are.

Between two uses of a weight, a pass reads all others: where they are more than caches hold, none is
there when it is read again. What an operator has just made may be.
"""

from collections.abc import Iterator, Mapping
from math import prod

from parloom.ir.graph import CACHE, DTYPE_BYTES
from parloom.ir.layout import local_shape
from parloom.ir.ops import op_of
from parloom.ir.pcg import PCG, Compute, PCall, PFunction

KINDS = ("parameter", "buffer", CACHE)
"""Of inputs that are stored."""


def stored_bytes(pcg: PCG) -> int:
    """Bytes of the stored values that one rank reads in a pass, gathered weights whole."""
    inputs = zip(pcg.graph.inputs, pcg.main.inputs, strict=True)
    return sum(
        prod(local_shape(v.layout, v.spec.shape, pcg.mesh)) * DTYPE_BYTES[v.spec.dtype]
        for entry, v in inputs
        if entry.kind in KINDS
    )


def stored_values(pcg: PCG) -> Mapping[str, frozenset[str]]:
    """By function, the names of its values that are stored ones or views of them, in any call."""
    inputs = zip(pcg.graph.inputs, pcg.main.inputs, strict=True)
    first = frozenset(v.name for entry, v in inputs if entry.kind in KINDS)
    found: dict[str, frozenset[str]] = {}
    for function, names in _bodies(pcg, pcg.main, first):
        found[function.name] = found.get(function.name, frozenset()) | names
    return found


def _bodies(
    pcg: PCG, function: PFunction, names: frozenset[str]
) -> Iterator[tuple[PFunction, frozenset[str]]]:
    """A function whose stored inputs have these names, and all that it calls, with their names."""
    known = set(names)
    for item in function.body:
        if isinstance(item, Compute) and op_of(item.node).view:
            if item.operands[0].name in known:
                known |= {value.name for value in item.results}
        elif isinstance(item, PCall):
            called = pcg.by_name[item.function]
            pairs = zip(item.args, called.inputs, strict=True)
            given = frozenset(own.name for value, own in pairs if value.name in known)
            yield from _bodies(pcg, called, given)
    yield function, frozenset(known)
