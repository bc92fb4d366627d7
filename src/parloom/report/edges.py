"""What one operator costs, term by term: computing, movements on its edges, and its parameters."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from parloom.cost.local_operators import local_operator
from parloom.cost.shares import GATHERS, REDUCES, Runs, Share, Term, parameter_terms
from parloom.cost.works import Exchange
from parloom.ir.graph import DTYPE_BYTES, FlatNode, below
from parloom.ir.pcg import Compute, Movement, PFunction, PParameter, PValue, results_of
from parloom.ir.step_program import EACH_MICROBATCH, EACH_PASS
from parloom.report.case import Case

PS = 1e12


@dataclass(frozen=True, slots=True)
class Price:
    """A term: `what`, and of which tensor; seconds each time that it runs, forward and backward,
    and in a step. Of a collective: axes, level, and bytes that a device sends.
    """

    what: str
    of: str = ""
    axes: tuple[str, ...] = ()
    level: str = ""
    num_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0


def variant_of(case: Case, flat: FlatNode) -> PFunction:
    """The lowered function in which an operator runs."""
    call = case.calls.get(flat.prefix)
    return case.pcg.main if call is None else case.pcg.by_name[call.function]


def runs_of(case: Case, flat: FlatNode) -> Runs:
    """How often a step runs one call of an operator."""
    count, call = case.pcg.num_microbatches, case.calls.get(flat.prefix)
    return Runs(count, count if call is not None and call.policy == "recompute" else 0)


def own_shares(case: Case, flat: FlatNode) -> tuple[Share, ...]:
    """The items of an operator: movements made for it, and what it computes."""
    function = variant_of(case, flat)
    return tuple(s for s in case.shares[function.name] if s.key == flat.node.key)


def values_of(case: Case, flat: FlatNode) -> dict[str, PValue]:
    """The values of the function in which an operator runs, as they lie."""
    function = variant_of(case, flat)
    made = (v for item in function.body for v in results_of(item))
    return {value.name: value for value in (*function.inputs, *made)}


def prices(case: Case, flat: FlatNode) -> Iterator[Price]:
    """All terms of one call of an operator; those of what leaves it belong to its readers, too."""
    own, runs = own_shares(case, flat), runs_of(case, flat)
    computed = [share for share in own if share.moves is None]
    yield Price(
        "computing",
        forward_s=sum(share.forward_ps for share in computed) / PS,
        backward_s=sum(share.backward_ps for share in computed) / PS,
        step_s=sum(map(runs.ps, computed)) / PS,
    )
    yield Price(
        "its memory traffic",
        num_bytes=memory_bytes(case, computed),
        forward_s=memory_s(case, computed),
    )
    made = {value.name for share in computed for value in results_of(share.item)}
    for share in own:
        if share.moves is not None:
            inside = share.roots[0] in made
            yield _moved(case, "inside: " if inside else "comes in: ", share, runs)
    for reader, share in _leaving(case, flat):
        yield _moved(case, f"to {reader}: ", share, runs)


def own_ps(case: Case, keys: Iterable[str]) -> int:
    """What these operators compute and what is moved for them in a step, each on its own."""
    wanted = set(keys)
    flats = (flat for flat in case.pcg.graph.flat() if flat.key in wanted)
    return sum(runs_of(case, flat).ps(share) for flat in flats for share in own_shares(case, flat))


def parameter_prices(case: Case, parameter: PParameter) -> Iterator[Price]:
    """The terms of one parameter, as its part of what it travels with."""
    passes = case.pcg.num_microbatches
    times = {EACH_PASS: 2 * passes, EACH_MICROBATCH: passes}
    name = parameter.input.target
    found: Term
    for found in parameter_terms(case.priced, parameter):
        seconds = found.ps / PS
        backward = found.when == EACH_PASS or found.name.startswith(REDUCES)
        yield Price(
            found.name, name, found.exchange.axes if found.exchange else (),
            level_of(case, found.exchange), found.num_bytes,
            seconds if found.name.startswith(GATHERS) else 0.0, seconds if backward else 0.0,
            seconds * times.get(found.when, 1),
        )  # fmt: skip


def memory_bytes(case: Case, computed: list[Share]) -> int:
    """What forward passes read and write of memory, all of their operators together."""
    found = 0
    for share in computed:
        if isinstance(share.item, Compute) and share.forward is not None:
            local = local_operator(share.item, case.pcg.mesh)
            specs = (*local.operands, *local.results)
            found += sum(spec.num_elements * DTYPE_BYTES[spec.dtype] for spec in specs)
    return found


def memory_s(case: Case, computed: list[Share]) -> float:
    """What that takes at least."""
    return case.priced.walker.kernels.stream_s(memory_bytes(case, computed), 0)


def bound_of(case: Case, flat: FlatNode) -> str:
    """What keeps the forward pass of an operator busy most: launches, memory or arithmetic."""
    computed = [share for share in own_shares(case, flat) if share.moves is None]
    seconds = sum(share.forward_ps for share in computed) / PS
    runs = sum(share.forward_ps > 0 for share in computed)
    launches = runs * case.priced.walker.kernels.software.launch_s
    if not seconds:
        return "nothing: it only looks at memory otherwise"
    if 2 * launches >= seconds:
        return "launching kernels"
    return "memory" if 2 * memory_s(case, computed) >= seconds - launches else "arithmetic"


def flops(case: Case, computed: list[Share]) -> float:
    """Floating-point operations of a forward pass on one device."""
    return sum(
        local_operator(share.item, case.pcg.mesh).flops
        for share in computed
        if isinstance(share.item, Compute)
    )


def level_of(case: Case, exchange: Exchange | None) -> str:
    """The level of the topology that a collective keeps busy longest, as `cost.ledger` has it."""
    if exchange is None:
        return ""
    levels = case.cluster.levels
    if not exchange.busy:
        return levels[max(case.pcg.mesh[axis].level for axis in exchange.axes)].name
    busy = dict(exchange.busy)
    return levels[max(busy, key=busy.__getitem__)].name


def _moved(case: Case, word: str, share: Share, runs: Runs) -> Price:
    assert share.moves is not None
    (row, axes), exchange = share.moves, share.exchange
    works = [work for work in (share.forward, share.backward) if work is not None]
    kinds = dict.fromkeys(work.exchange.kind if work.exchange else work.kind for work in works)
    size = sum(size for _, size, _ in exchange.traffic) if exchange else 0
    return Price(
        f"{word}{row} ({', '.join(kinds) or 'nothing is sent'})",
        share.roots[0], axes, level_of(case, exchange), round(size),
        share.forward_ps / PS, share.backward_ps / PS, runs.ps(share) / PS,
    )  # fmt: skip


def _leaving(case: Case, flat: FlatNode) -> Iterator[tuple[str, Share]]:
    """Movements of what an operator makes, made for others: the reader, and the movement."""
    function = variant_of(case, flat)
    names = {value.name for value in flat.node.results}
    for reader, share in _from(case, function, flat.prefix, names):
        if share.key != flat.node.key:
            yield reader, share
    call = case.calls.get(flat.prefix)
    if call is not None:
        pairs = zip(function.outputs, call.results, strict=True)
        names = {outer.name for inner, outer in pairs if inner.name in names}
        yield from _from(case, case.pcg.main, "", names)
    for other in case.calls.values():
        callee = case.pcg.by_name[other.function]
        pairs = zip(other.args, callee.inputs, strict=True)
        inputs = {formal.name for given, formal in pairs if given.name in names}
        yield from _from(case, callee, other.prefix, inputs)


def _from(
    case: Case, function: PFunction, prefix: str, names: set[str]
) -> Iterator[tuple[str, Share]]:
    """Movements in a call that start from values of these names."""
    for share in case.shares[function.name]:
        if isinstance(share.item, Movement) and share.roots[0] in names:
            yield below(prefix, share.key) if share.key else "the end", share
