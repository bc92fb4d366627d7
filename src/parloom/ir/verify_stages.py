"""Invariants of plans of several stages, one table; `ir/verify.py` raises what is broken."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations, pairwise
from types import MappingProxyType

from parloom.errors import InputError, LayoutError, nearest
from parloom.ir.action_lists import check_lists
from parloom.ir.factors import Factored
from parloom.ir.graph import Call
from parloom.ir.lower_stages import group_lists
from parloom.ir.plan import Decisions
from parloom.ir.stages import cut_plan
from parloom.ir.verify_dtypes import communication

Problems = Iterator[str]
Planned = tuple[Factored, Decisions]


def known_operators(planned: Planned) -> Problems:
    """Decisions that name no operator of the model."""
    factored, decisions = planned
    keys = {key for key, _ in factored.graph.unfolded()}
    for node in decisions.nodes:
        if node.key not in keys:
            yield f"no operator {node.key!r} in the model{nearest(node.key, keys)}"


def _stages(planned: Planned) -> Problems:
    """Stages are a cut of the model, on devices that the schedule goes around."""
    factored, decisions = planned
    if decisions.accumulates and factored.graph.updates:
        name = factored.graph.updates[0][0]
        yield (
            f"each microbatch leaves {name} to the next one, and stages run several at once: not"
            " yet there; use one stage or --batch-semantics global"
        )
    shares = list(_shares(decisions))
    if shares:
        yield shares[0]
        return
    groups = {stage.devices for stage in decisions.stages}
    if decisions.actions and len(decisions.actions) != len(groups):
        yield f"{len(decisions.actions)} action lists for {len(groups)} groups of devices"
        return
    try:
        parts = cut_plan(factored.graph, decisions)
        listed = group_lists(decisions)
        check_lists(
            [stages for stages, _ in listed],
            [own for _, own in listed],
            # Whether a gradient comes back is known once the stages are lowered.
            [(c.source, to, c.value.spec.is_float) for c in parts.crossings for to in c.targets],
            [decisions.microbatches_of(stage) for stage in range(len(decisions.stages))],
        )
    except (LayoutError, InputError) as error:
        yield str(error)
    for one, other in combinations(decisions.stages, 2):
        both = {d for part in one.devices for d in part} & {d for p in other.devices for d in p}
        if both and one.devices != other.devices:
            yield f"two stages share device {min(both)} and not all of theirs"
        elif both and one.rank_devices != other.rank_devices:
            yield f"two stages share devices {min(both)} to {max(both)} and lie on them otherwise"


def _shares(decisions: Decisions) -> Problems:
    """Which microbatches stages run, and how many at once."""
    count = decisions.num_microbatches
    for index, stage in enumerate(decisions.stages):
        if count % stage.at_once:
            yield (
                f"stage {index} runs {stage.at_once} microbatches at once, which does not divide"
                f" the {count} of the step"
            )
        if stage.at_once > 1 and (stage.microbatches or decisions.accumulates):
            yield f"stage {index} runs microbatches by themselves: not {stage.at_once} at once"
    sizes = sorted({stage.at_once for stage in decisions.stages})
    if any(larger % smaller for smaller, larger in pairwise(sizes)):
        yield f"stages run {sizes} microbatches at once; each must divide the next larger one"
    replicas = [decisions.stages[own[0]].microbatches for own in decisions.replicas]
    if replicas == [()]:
        return
    run = Counter(m for own in replicas for m in own or range(count))
    for microbatch in range(max(count, 1 + max(run))):
        if run[microbatch] != 1 or microbatch >= count:
            runs = f"{run[microbatch]} replica{'s' * (run[microbatch] != 1)}"
            yield f"microbatch {microbatch} of {count} is run by {runs}; each is run by one"
    if decisions.accumulates:
        yield "replicas share a batch whose loss is that of the whole: not each microbatch's"


def _known_parameters(planned: Planned) -> Problems:
    factored, decisions = planned
    names = {i.target for i in factored.graph.of_kind("parameter")}
    for parameter in decisions.parameters:
        if parameter.name not in names:
            yield f"no parameter {parameter.name!r} in the model{nearest(parameter.name, names)}"


def unknown_block(prefix: str, known: Iterable[str]) -> str:
    """What is said of an activation policy for no block."""
    return f"no block {prefix!r} in the model{nearest(prefix, known)}"


def _known_blocks(planned: Planned) -> Problems:
    factored, decisions = planned
    blocks = [item.prefix for item in factored.graph.main.body if isinstance(item, Call)]
    for activation in decisions.activations:
        if activation.prefix not in blocks:
            yield unknown_block(activation.prefix, blocks)


STAGES: Mapping[str, Callable[[Planned], Problems]] = MappingProxyType(
    {
        "decisions name operators of the model": known_operators,
        "decisions name parameters of the model": _known_parameters,
        "activation policies name blocks": _known_blocks,
        "stages are a cut of the model": _stages,
        "communication has a known data type": communication,
    }
)
