"""A candidate as a plan says it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parloom.ir.plan import ActivationDecision, Decisions, NodeDecision, one_stage
from parloom.rewrite.forms import Form
from parloom.search.compose import Candidate, Chosen, policy_of, recomputed
from parloom.search.layout_model import LayoutModel
from parloom.search.model import Floats
from parloom.search.prices import KEPT
from parloom.search.program import Block
from parloom.search.restated import Factors, restated


def form_of(layouts: LayoutModel, values: Sequence[int]) -> Form:
    """The graph of a solution."""
    pairs = zip(layouts.options, values, strict=False)
    choices = (own.menu.choices[own.option(value)[0]] for own, value in pairs)
    return layouts.program.form({i: c.taken for i, c in enumerate(choices) if c.taken >= 0})


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
    program, form = layouts.program, form_of(layouts, candidate.values)
    index_of = program.index_of(form)
    # Calls of a block have the same layouts.
    chosen = {i: _factors(layouts, candidate, i, form) for i in set(index_of.values())}
    nodes = [NodeDecision(name, chosen[index]) for name, index in index_of.items()]
    parameters = []
    for weight, stored in zip(program.weights, candidate.levels, strict=True):
        levels = [level for level, count in stored for _ in range(count)]
        parameters += [
            level.decision(target)
            for level, target in zip(levels, weight.targets, strict=True)
            if level.says
        ]
    activations = [
        decision
        for block, chosen in zip(program.blocks, candidate.variants, strict=True)
        for decision in _activations(layouts, block, chosen, prices, form)
    ]
    return replace(
        base,
        stages=one_stage(layouts.mesh),
        nodes=tuple(nodes),
        parameters=tuple(parameters),
        activations=tuple(activations),
        num_microbatches=num_microbatches,
        rewrites=form.rewrites,
    )


def _factors(layouts: LayoutModel, candidate: Candidate, index: int, form: Form) -> Factors:
    """The split of an operator, as one of this form."""
    choice, _ = layouts.options[index].option(candidate.values[index])
    factors = layouts.options[index].menu.choices[choice].assignment
    if layouts.program.forms is None:
        return factors
    operator = layouts.program.operators[index]
    return restated(factors, operator.rule, form.rules[operator.place], layouts.mesh)


def _activations(
    layouts: LayoutModel, block: Block, chosen: tuple[Chosen, ...], prices: Floats, form: Form
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
        values, moves = (
            tuple(form.key_of(block.function, name) for name in names)
            for names in recomputed(layouts, block, some.variant, prices)
        )
        if some.variant.whole or values or moves:
            yield from (ActivationDecision(prefix, "recompute", values, moves) for prefix in own)
