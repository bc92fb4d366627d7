"""Which tensors fill memory at its peak, and which values calls make again in place of keeping."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from parloom.cost.holdings import holdings
from parloom.cost.tasks import COMPONENTS
from parloom.report.case import Case
from parloom.report.folded import names_text

Document = dict[str, Any]
LARGEST = 12


def largest_tensors(cases: Iterable[Case], at_peak: Sequence[int]) -> list[Document]:
    """What a device that runs these stages stores, and keeps for backward passes of a microbatch:
    the largest first, tensors of one name together. `at_peak` are the bytes of each component at
    the peak: what is more cannot be there, as gradients before backward passes.
    """
    there = dict(zip(COMPONENTS, at_peak, strict=True))
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for case in cases:
        for held in holdings(case.pcg, case.priced):
            counts[held.component, held.name] += held.count
            sizes[held.component, held.name] += held.num_bytes
    return [
        {"component": component, "name": name, "count": counts[component, name], "bytes": size}
        for (component, name), size in sizes.most_common()
        if size <= there[component]
    ][:LARGEST]


def recomputed(case: Case) -> Iterator[Document]:
    """Calls of each block kind that make the same again in their backward passes: `all`, or single
    `values` by their keys in the block, and redistributions (`moves`) of others.
    """
    decided = {own.prefix: own for own in case.decisions.activations}
    found: dict[tuple[str, bool, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for prefix, call in case.calls.items():
        own, kind = decided.get(prefix), case.pcg.by_name[call.function].kind
        values, moves = (own.values, own.moves) if own else ((), ())
        found.setdefault((kind, call.policy == "recompute", values, moves), []).append(prefix)
    makes_again = {kind for kind, whole, values, moves in found if whole or values or moves}
    for (kind, whole, values, moves), prefixes in found.items():
        if kind in makes_again:
            yield {
                "place": kind,
                "calls": names_text(prefixes),
                "count": len(prefixes),
                "all": whole,
                "values": list(values),
                "moves": list(moves),
                "of": len(case.pcg.graph.by_name[kind].body),
            }
