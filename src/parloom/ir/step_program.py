"""The step program: what happens to parameters outside autograd, as nodes.

Gradients leave autograd partial over `PParameter.reduce`. The nodes below make them whole, update
the owned chunks and make the weights whole again (ZeRO: Rajbhandari et al., SC'20). The action list
names when: GATHER nodes of chunked weights run in every pass, REDUCE nodes of chunked gradients in
every microbatch, everything else once a step. The runtime cuts them into buckets as gradients
arrive; the cost layer prices the same nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from parloom.ir.pcg import PCG, TIME, PCall, PParameter

EACH_PASS, EACH_MICROBATCH, EACH_STEP = "pass", "microbatch", "step"


@dataclass(frozen=True, slots=True)
class StepNode:
    """`kind` over `axes` for parameters of one unit or group, at the times `when` says.

    Kinds: all_gather, reduce_scatter, all_reduce (collectives over `axes`); norm (the clipping
    norm, each element counted once); update (the optimizer on owned chunks).
    """

    action: str
    kind: str
    axes: tuple[str, ...]
    parameters: tuple[PParameter, ...]
    when: str = EACH_STEP

    def __str__(self) -> str:
        over = f" over {'x'.join(self.axes)}" if self.axes else ""
        return f"{self.action}: {self.kind}{over} of {len(self.parameters)}, each {self.when}"


def step_program(pcg: PCG) -> tuple[StepNode, ...]:
    """All nodes in the order in which a step runs them."""
    trained = tuple(p for p in pcg.parameters if p.input.trainable)
    update = (
        StepNode("STEP", "norm", (), trained),
        StepNode("STEP", "update", (), trained),
    )
    return (*_unit_gathers(pcg), *_reductions(trained), *update, *_publications(trained))


def _unit_gathers(pcg: PCG) -> Iterator[StepNode]:
    """Weights stored in chunks are gathered for the unit that reads them, in both passes."""
    first = {
        value.name: item.prefix
        for item in reversed(pcg.main.body)
        if isinstance(item, PCall)
        for value in item.args
    }
    groups: dict[tuple[str, tuple[str, ...], str], list[PParameter]] = {}
    for parameter in pcg.parameters:
        axes = parameter.decision.weight.axes
        if axes:
            value = parameter.input.value
            key = (first.get(value.name, ""), axes, value.spec.dtype)
            groups.setdefault(key, []).append(parameter)
    for (_, axes, _), members in groups.items():
        yield StepNode("GATHER", "all_gather", axes, tuple(members), EACH_PASS)


def _reductions(trained: tuple[PParameter, ...]) -> Iterator[StepNode]:
    """Gradients stored in chunks are scattered where they are partial over the chunks' axes."""
    groups: dict[tuple[str, tuple[str, ...], str], list[PParameter]] = {}
    for parameter in trained:
        partial = tuple(a for a in parameter.reduce if a != TIME)
        chunks = parameter.decision.gradient.axes
        when = EACH_MICROBATCH if chunks else EACH_STEP
        if chunks and set(chunks) <= set(partial):
            groups.setdefault(("reduce_scatter", chunks, when), []).append(parameter)
            partial = tuple(a for a in partial if a not in chunks)
        if partial:
            groups.setdefault(("all_reduce", partial, when), []).append(parameter)
    for (kind, axes, when), members in groups.items():
        yield StepNode("REDUCE", kind, axes, tuple(members), when)


def _publications(trained: tuple[PParameter, ...]) -> Iterator[StepNode]:
    """Whole weights of which each rank updated a chunk (ZeRO-1 and 2) are gathered at the end."""
    groups: dict[tuple[str, ...], list[PParameter]] = {}
    for parameter in trained:
        decision = parameter.decision
        if decision.optimizer.axes and not decision.weight.axes:
            groups.setdefault(decision.optimizer.axes, []).append(parameter)
    for axes, members in groups.items():
        yield StepNode("GATHER", "all_gather", axes, tuple(members))
