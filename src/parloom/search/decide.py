"""A candidate as a plan says it."""

from collections.abc import Iterator
from dataclasses import replace

from parloom.ir.plan import ActivationDecision, Decisions, NodeDecision
from parloom.search.compose import Candidate, Chosen, Variant, policy_of
from parloom.search.fates import REGATHER, REMAKE
from parloom.search.layout_model import LayoutModel
from parloom.search.model import Floats
from parloom.search.prices import KEPT
from parloom.search.program import Block


def decisions_of(
    layouts: LayoutModel,
    candidate: Candidate,
    num_microbatches: int,
    base: Decisions,
    prices: Floats,
) -> Decisions:
    """The decisions of `candidate`, with what `base` says of dtypes; `prices` are those under which
    it was composed.
    """
    program, nodes = layouts.program, []
    for name, index in program.index.items():
        choice, _ = layouts.options[index].option(candidate.values[index])
        nodes.append(NodeDecision(name, layouts.options[index].menu.choices[choice].assignment))
    parameters = []
    for weight, stored in zip(program.weights, candidate.levels, strict=True):
        levels = [level for level, count in stored for _ in range(count)]
        parameters += [
            level.decision(target)
            for level, target in zip(levels, weight.targets, strict=True)
            if level.axes
        ]
    activations = [
        decision
        for block, chosen in zip(program.blocks, candidate.variants, strict=True)
        for decision in _activations(layouts, block, chosen, prices)
    ]
    return replace(
        base,
        mesh=layouts.mesh,
        nodes=tuple(nodes),
        parameters=tuple(parameters),
        activations=tuple(activations),
        num_microbatches=num_microbatches,
    )


def _activations(
    layouts: LayoutModel, block: Block, chosen: tuple[Chosen, ...], prices: Floats
) -> Iterator[ActivationDecision]:
    """What the calls of a block recompute: of equal calls the first keep least, as what the last
    call keeps is needed at once.
    """
    left = list(block.prefixes)

    def kept(some: Chosen) -> float:
        rows = layouts.call_rows(block, some.variant.values, prices)
        return 0.0 if some.variant.whole else float(rows[KEPT])

    for some in sorted(chosen, key=kept):
        own = [p for p in left if policy_of(layouts.program, p) == some.policy][: some.count]
        left = [prefix for prefix in left if prefix not in own]
        values, moves = _recomputed(layouts, block, some.variant, prices)
        if some.variant.whole or values or moves:
            yield from (ActivationDecision(prefix, "recompute", values, moves) for prefix in own)


def _recomputed(
    layouts: LayoutModel, block: Block, variant: Variant, prices: Floats
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The operators whose results a call makes again, and those and inputs of which it makes the
    redistributions again; nothing where it recomputes as a whole.
    """
    if variant.whole:
        return (), ()
    values, moves = [], []
    for index, _ in block.operators:
        _, fate = layouts.options[index].option(variant.values[index])
        key = layouts.program.operators[index].node.key
        if fate == REMAKE:
            values.append(key)
        if fate == REGATHER:
            moves.append(key)
    for number in block.flows:
        for edge in layouts.flows.rows(number, variant.values, prices)[1]:
            assert edge.reader is not None, "what is written back is not made again"
            node = layouts.program.operators[edge.reader.operator].node
            moves.append(node.refs[edge.reader.operand])
    return tuple(values), tuple(dict.fromkeys(moves))
