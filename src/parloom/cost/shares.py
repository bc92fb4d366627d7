"""What each operator of a lowered program costs: its own work, and the movements made for it.

An item belongs to the operator that it comes before: lowering an operator moves its operands, then
computes. What is left at the end of a function is moved for those that take its results.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from parloom.cost.kernels import Kernels
from parloom.cost.liveness import Lives
from parloom.cost.parameters import Transfer
from parloom.cost.step import Priced
from parloom.cost.tasks import picoseconds
from parloom.cost.walk import Walker
from parloom.cost.works import Exchange, Work
from parloom.ir.graph import Call, Function
from parloom.ir.pcg import (
    PCG,
    Item,
    Movement,
    PCall,
    PFunction,
    PParameter,
    operands_of,
    results_of,
)
from parloom.ir.step_program import EACH_MICROBATCH, EACH_STEP


@dataclass(frozen=True, slots=True)
class Share:
    """An item of a function each time that it runs; `key` is that of the operator it belongs to, or
    empty. `roots` are the values that a movement starts from, which are no movements' results;
    `again` is an item that every backward pass runs once more, `spared` one that those of calls
    which recompute do not need to (`Software.stops_early`). An operator that routes rows has two
    shares: what it computes, and what it sends.
    """

    key: str
    item: Item
    forward: Work | None
    backward: Work | None
    roots: tuple[str, ...]
    again: bool = False
    spared: bool = False

    @property
    def moves(self) -> tuple[str, tuple[str, ...]] | None:
        """The movement that it is, and its axes; None for what computes."""
        if isinstance(self.item, Movement):
            return self.item.step.row.removesuffix("_varying"), self.item.step.axes
        exchange = self.exchange
        return None if exchange is None else ("route", exchange.axes)

    @property
    def exchange(self) -> Exchange | None:
        """What it sends forward, or if nothing, backward."""
        works = (work for work in (self.forward, self.backward) if work is not None)
        return next((work.exchange for work in works if work.exchange is not None), None)

    @property
    def forward_ps(self) -> int:
        """Computing and exchanging."""
        return work_ps(self.forward)

    @property
    def backward_ps(self) -> int:
        return work_ps(self.backward)


@dataclass(frozen=True, slots=True)
class Runs:
    """How often a step runs a function: forward passes, backward passes, forward passes again."""

    forward: int = 0
    again: int = 0

    def ps(self, share: Share) -> int:
        """An item in all of a step."""
        again = self.again_of(share)
        return (self.forward + again) * share.forward_ps + self.forward * share.backward_ps

    def again_of(self, share: Share) -> int:
        """How often backward passes run an item's forward pass."""
        return (0 if share.spared else self.again) + (self.forward if share.again else 0)


def work_ps(work: Work | None) -> int:
    """What a work takes where nothing else goes on."""
    if work is None:
        return 0
    exchange = 0 if work.exchange is None else picoseconds(work.exchange.seconds)
    return picoseconds(work.compute_s) + exchange


def shares(pcg: PCG, walker: Walker) -> Mapping[str, tuple[Share, ...]]:
    """The items of every variant of a block kind and of main, by the variant's name."""
    found = {pcg.main.name: _shares(pcg.graph.main, pcg.main, walker, walker.kernels_of_main)}
    for function in pcg.functions:
        found[function.name] = _shares(
            pcg.graph.by_name[function.kind], function, walker, walker.kernels
        )
    return found


def runs(pcg: PCG) -> Mapping[str, Runs]:
    """How often a step runs each of them."""
    count = pcg.num_microbatches
    found = {pcg.main.name: Runs(count)}
    for item in pcg.main.body:
        if isinstance(item, PCall):
            before = found.get(item.function, Runs())
            again = count if item.policy == "recompute" else 0
            found[item.function] = Runs(before.forward + count, before.again + again)
    return found


def _shares(
    function: Function, lowered: PFunction, walker: Walker, kernels: Kernels
) -> tuple[Share, ...]:
    lives = Lives(frozenset(), frozenset())
    items = tuple(item for item in lowered.body if not isinstance(item, PCall))
    walker.walk(lowered.inputs, items, lives, lowered.outputs, lowered.remake, kernels)
    remade = set() if lowered.remake is None else {id(item) for item in lowered.remake.body}
    keys = _keys(function, items)
    roots: dict[str, str] = {}
    found: list[Share] = []
    needed = lives.saved_before if walker.kernels.software.stops_early else len(items)
    for index, (item, key, forward, backward) in enumerate(
        zip(items, keys, lives.forward, lives.backward, strict=True)
    ):
        starts = tuple(roots.get(v.name, v.name) for v in operands_of(item))
        if isinstance(item, Movement):
            roots[item.result.name] = starts[0]
        one, other = (work if isinstance(work, Work) else None for work in (forward, backward))
        share = Share(key, item, one, other, starts, id(item) in remade, index >= needed)
        sends = share.exchange is not None and not isinstance(item, Movement)
        found += _apart(share) if sends else (share,)
    return tuple(found)


def _apart(share: Share) -> Iterator[Share]:
    """An operator that routes rows: what it computes, and what it sends."""
    one, other = share.forward, share.backward
    still = [work and replace(work, exchange=None) for work in (one, other)]
    sent = [work and replace(work, compute_s=0.0) for work in (one, other)]
    for forward, backward in (still, sent):
        yield replace(share, forward=forward, backward=backward)


def _keys(function: Function, items: Sequence[Item]) -> list[str]:
    """The key of the operator that each item belongs to."""
    maker = {
        value.name: node.key
        for node in function.body
        if not isinstance(node, Call)
        for value in node.results
    }
    keys, key = [], ""
    for item in reversed(items):
        key = next((maker[v.name] for v in results_of(item) if v.name in maker), key)
        keys.append(key)
    return keys[::-1]


# What is done with parameters.
GATHERS, REDUCES, PUBLISHES, UPDATES = (
    "gather the weight", "reduce the gradient", "gather the updated weight", "update",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Term:
    """What a parameter adds to a step besides computing: its part of a collective or of the update.

    `when` as in `ir.step_program`. `ps` are for one time, in which nothing else goes on.
    """

    name: str
    exchange: Exchange | None
    when: str
    num_bytes: int
    ps: int


def parameter_terms(found: Priced, parameter: PParameter) -> Iterator[Term]:
    """Gathers, reductions, update and publication of one parameter, as parts of what it travels
    with.
    """
    priced, name = found.parameters, parameter.input.value.name
    home, gathers = priced.home_bytes(parameter), priced.gathers
    # Main's own weights, and those of the last unit, stay whole from forward to backward pass.
    stay = {"", None, gathers[-1].unit if gathers else None}
    kept = tuple(replace(g, when=EACH_MICROBATCH) if g.unit in stay else g for g in gathers)
    for transfers, size, words in (
        (kept, home, GATHERS),
        (found.reductions, priced.gradient_bytes(parameter), REDUCES),
        (priced.publications, priced.kept_bytes(parameter), PUBLISHES),
    ):
        for transfer in transfers:
            if name in transfer.parameters:
                yield from _travels(transfer, size, words)
    if parameter.input.trainable:
        mesh = found.parameters.pcg.mesh
        owned = parameter.elements(mesh, parameter.decision.optimizer)
        size = owned * priced.master_width(parameter)
        kernels, states = found.walker.kernels, priced.optimizer.num_states
        seconds = kernels.update_s(size, states) - kernels.software.launch_s
        yield Term(UPDATES, None, EACH_STEP, size, picoseconds(max(0.0, seconds)))


def _travels(transfer: Transfer, size: int, words: str) -> Iterator[Term]:
    share = size / max(1, transfer.num_bytes)
    for exchange in transfer.exchanges:
        ps = picoseconds(exchange.seconds * share)
        yield Term(f"{words}: {exchange.kind}", exchange, transfer.when, size, ps)
