"""A plan as other frameworks are set up: the nearest configuration, and all that is not of it.

The configuration (degrees, ZeRO, pipeline) is read from the decisions. Then the plan that it means
is made (`comparators.configuration`) and compared: whatever the plan decides otherwise is
`irregular`. So a plan is called regular only where its settings mean all of it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import prod

from parloom.comparators.configuration import (
    Configuration,
    cheap_operators,
    laid_out,
    num_positions,
    num_samples,
)
from parloom.comparators.handmade import divided
from parloom.comparators.tensor_parallel import TENSOR
from parloom.cost.clusters import resolve_cluster
from parloom.errors import InputError, LayoutError
from parloom.execute.program import lowered
from parloom.export.differences import (
    Program,
    operator_differences,
    parameter_differences,
    split_words,
)
from parloom.export.roles import (
    CONTEXT,
    COPY,
    DATA,
    OF_CONFIGURATIONS,
    Splits,
    degree,
    links,
    splits_of,
)
from parloom.ir.graph import Call, Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, Plan, Stage
from parloom.ir.plan_json import numbers_text
from parloom.ir.regular_parts import devices_of, part_with, used_cluster
from parloom.ir.schedules import CHUNKS
from parloom.ir.stages import item_key
from parloom.ir.text import parse_graph
from parloom.report.naming import Names, names_of
from parloom.report.words import rewrite_words
from parloom.rewrite.rewrites import BLOCK, rewritten, takes_of
from parloom.rewrite.stripes import parse_stripe


class Kind(Enum):
    """What a decision is about that the nearest configuration does not mean."""

    LAYOUT = auto()
    ORDER = auto()
    STAGES = auto()
    SCHEDULE = auto()
    REWRITE = auto()


@dataclass(frozen=True, slots=True)
class Irregular:
    """A decision beyond the nearest configuration, in words that name the user's modules."""

    kind: Kind
    words: str


@dataclass(frozen=True, slots=True)
class Recompute:
    """What blocks make again in their backward passes: of each block whether it is the whole one,
    and the operators of those that make some; `cheap` says that all make what is cheap.
    """

    whole: tuple[bool, ...] = ()
    some: tuple[str, ...] = ()
    cheap: bool = False

    @property
    def every(self) -> bool:
        """Whether all blocks are recomputed as a whole."""
        return bool(self.whole) and all(self.whole)


@dataclass(frozen=True)
class Description:
    """What a plan's settings are; `graph` is rewritten as the plan says.

    `blocks` are the module paths of repeated blocks in order, `stages` the items of each pipeline
    stage (one where there is no pipeline), `dtype` is that of most weights.
    """

    plan: Plan
    graph: Graph
    cluster: Cluster
    chosen: Configuration
    blocks: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]
    recompute: Recompute
    dtype: str
    positions: int
    irregular: tuple[Irregular, ...]

    @property
    def samples(self) -> int:
        """The global batch."""
        return _samples(self.graph, self.plan.decisions)

    @property
    def blocks_of_stages(self) -> tuple[int, ...]:
        """How many blocks each stage has."""
        own = set(self.blocks)
        return tuple(len(own.intersection(items)) for items in self.stages)

    @property
    def even(self) -> bool:
        """Whether stages have equally many blocks, or one fewer at both ends."""
        counts = list(self.blocks_of_stages)
        return len(counts) == 1 or (
            sum(counts) >= len(counts) and counts == divided(sum(counts), len(counts))
            and (len(set(counts)) == 1 or (len(set(counts[1:-1])) == 1 and counts[0] == counts[-1]))
        )  # fmt: skip

    def are(self, *kinds: Kind) -> Iterator[str]:
        """The words of what is irregular of these kinds."""
        return (own.words for own in self.irregular if own.kind in kinds)


def _samples(graph: Graph, decisions: Decisions) -> int:
    """The global batch; the graph may be of one microbatch."""
    alone = any(entry.samples is not None for entry in graph.of_kind("batch"))
    return num_samples(graph) * (decisions.num_microbatches if alone else 1)


def describe(plan: Plan) -> Description:
    """The settings that are nearest to a plan, and what they do not mean."""
    captured = parse_graph(plan.graph)
    decisions = plan.decisions
    stages = lowered(plan, captured)
    graph = rewritten(captured, decisions.rewrites)
    names = names_of(graph)
    splits = [splits_of(pcg, names) for pcg in stages.pcgs]
    usual = _usual(stages.pcgs, splits)
    cluster = used_cluster(resolve_cluster(plan.cluster).cluster, decisions)
    programs = [Program(pcg, own.roles) for pcg, own in zip(stages.pcgs, splits, strict=True)]
    tried = [
        (one, list(_layout_words(captured, decisions, one, cluster, programs, usual, names)))
        for one in _configurations(captured, decisions, stages.pcgs[usual], splits[usual])
    ]
    chosen, layouts = min(tried, key=lambda one: len(one[1]))
    calls = [item for item in graph.main.body if isinstance(item, Call)]
    blocks = tuple(call.prefix for call in calls)
    items = tuple(stage.items for stage in decisions.stages)
    if len(items) == 1:
        items = (tuple(map(item_key, graph.main.body)),)
    irregular = [
        *_stage_words(decisions, stages.pcgs, splits, usual),
        *_schedule_words(decisions, chosen),
        *_rewrite_words(captured, decisions),
        *layouts,
    ]
    return Description(
        plan,
        graph,
        cluster,
        chosen,
        blocks,
        items,
        _recompute(graph, decisions, calls),
        _dtype(captured),
        num_positions(captured),
        tuple(irregular),
    )


def _usual(pcgs: Sequence[PCG], splits: Sequence[Splits]) -> int:
    """The first of the stages whose degrees most stages have."""
    degrees = [_degrees(own, pcg) for pcg, own in zip(pcgs, splits, strict=True)]
    return degrees.index(Counter(degrees).most_common(1)[0][0])


def _degrees(splits: Splits, pcg: PCG) -> tuple[tuple[str, int], ...]:
    mesh = pcg.decisions.mesh
    found = ((role, degree(splits.roles, role, mesh)) for role in (DATA, CONTEXT, TENSOR, COPY))
    return tuple((role, size) for role, size in found if size > 1)


def _configurations(
    graph: Graph, decisions: Decisions, pcg: PCG, splits: Splits
) -> Iterator[Configuration]:
    """What a plan may be: where experts are over tensor-parallel ranks, too, either these share
    tokens and experts as others do, or each has a part of what the others' experts are.
    """
    found = _configuration(graph, decisions, pcg, splits)
    yield found
    alone = tuple(axis for axis in splits.experts if splits.roles[axis] == DATA)
    if alone != splits.experts:
        yield replace(found, expert=pcg.decisions.mesh.size(alone))


def _configuration(graph: Graph, decisions: Decisions, pcg: PCG, splits: Splits) -> Configuration:
    mesh, roles = pcg.decisions.mesh, splits.roles
    data, tensor, context = (degree(roles, role, mesh) for role in (DATA, TENSOR, CONTEXT))
    groups = {stage.devices for stage in decisions.stages}
    level, shard = _zero(pcg, splits)
    count = decisions.num_microbatches
    plain = len(decisions.stages) == 1 or decisions.schedule in ("1f1b", "interleaved_1f1b")
    return Configuration(
        tensor=tensor,
        pipeline=len(groups),
        interleave=max(1, len(decisions.stages) // len(groups)),
        data=data,
        context=context,
        copies=degree(roles, COPY, mesh),
        expert=mesh.size(splits.experts),
        zero=level,
        shard=shard,
        microbatch=max(1, _samples(graph, decisions) // (data * count)),
        num_microbatches=count,
        sequence_parallel=splits.sequence and tensor > 1,
        master_dtype=decisions.master_dtype,
        reduce_dtype=decisions.reduce_dtype,
        ring=splits.ring,
        striped=any(map(parse_stripe, decisions.rewrites)),
        schedule="" if plain else decisions.schedule,
    )


def _zero(pcg: PCG, splits: Splits) -> tuple[int, int]:
    """The level of ZeRO of most bytes of parameters, and over how many data-parallel ranks."""
    mesh, found = pcg.decisions.mesh, Counter[tuple[int, int]]()
    shared = {axis.name for axis in mesh.axes if splits.roles[axis.name] != TENSOR}
    for parameter in pcg.parameters:
        own = parameter.decision
        if not parameter.input.value.spec.shape or shared <= {*parameter.layout.axes}:
            continue  # nothing to divide
        stored = own.weight, own.gradient, own.optimizer
        level = next((3 - i for i, storage in enumerate(stored) if storage.axes), 0)
        axes = stored[3 - level].axes if level else ()
        over = mesh.size(tuple(a for a in axes if splits.roles[a] == DATA))
        over = over * mesh.size(tuple(a for a in splits.experts if a not in axes)) if level else 0
        found[level, over] += parameter.input.value.spec.num_bytes
    if not found:
        return 0, 0
    level, over = found.most_common(1)[0][0]
    data = degree(splits.roles, DATA, mesh)
    return level, over if level and 1 <= over < data and data % over == 0 else 0


def _stage_words(
    decisions: Decisions, pcgs: Sequence[PCG], splits: Sequence[Splits], usual: int
) -> Iterator[Irregular]:
    """Stages of other degrees, replicas of pipelines, microbatches of another size."""
    stages = decisions.stages
    if len(decisions.replicas) > 1:
        shares = ", ".join(numbers_text(stages[own[0]].microbatches) for own in decisions.replicas)
        yield Irregular(
            Kind.STAGES,
            f"{len(decisions.replicas)} pipelines side by side, with microbatches {shares}",
        )
    wanted = _degrees(splits[usual], pcgs[usual])
    others: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for index, (pcg, own) in enumerate(zip(pcgs, splits, strict=True)):
        if _degrees(own, pcg) != wanted:
            others.setdefault(_degrees(own, pcg), []).append(index)
    for found, numbers in others.items():
        yield Irregular(
            Kind.STAGES,
            f"stage{'s' * (len(numbers) > 1)} {numbers_text(numbers)}"
            f" {split_words(_degrees_text(found), _degrees_text(wanted))}",
        )
    for index, stage in enumerate(stages):
        if stage.at_once > 1:
            yield Irregular(Kind.STAGES, f"stage {index} runs {stage.at_once} microbatches at once")


def _degrees_text(degrees: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{role} {size}" for role, size in degrees)


def _schedule_words(decisions: Decisions, chosen: Configuration) -> Iterator[Irregular]:
    """Lists of actions of one's own, and stages that devices do not take by turns."""
    if decisions.actions:
        yield Irregular(Kind.SCHEDULE, "lists of actions of its own")
    groups = list(dict.fromkeys(stage.devices for stage in decisions.stages))
    ranks = len(groups)
    taken = [groups.index(stage.devices) for stage in decisions.stages]
    there_and_back = CHUNKS.get(decisions.schedule) == 2
    turns = [*range(ranks), *reversed(range(ranks))] if there_and_back else [*range(ranks)]
    if len(decisions.replicas) == 1 and taken != [
        turns[index % len(turns)] for index in range(len(taken))
    ]:
        yield Irregular(Kind.STAGES, "devices that do not take the stages by turns")


def _rewrite_words(graph: Graph, decisions: Decisions) -> Iterator[Irregular]:
    """Values that are computed in another way, with the rules."""
    taken = tuple(map(str, takes_of(decisions.rewrites)))
    if taken:
        for line in rewrite_words(graph, decisions):
            yield Irregular(Kind.REWRITE, f"rewrite: {line}")


def _layout_words(
    graph: Graph,
    decisions: Decisions,
    chosen: Configuration,
    cluster: Cluster,
    programs: Sequence[Program],
    usual: int,
    names: Names,
) -> Iterator[Irregular]:
    """Where the plan that `chosen` means lays tensors out otherwise."""
    stage = decisions.stages[usual]
    try:
        meant = _meant(graph, decisions, chosen, _part(cluster, stage))
    except (InputError, LayoutError) as error:
        yield Irregular(Kind.LAYOUT, f"these settings are no plan of the model ({error})")
        alone = Configuration(microbatch=chosen.samples // chosen.num_microbatches,
                              num_microbatches=chosen.num_microbatches)  # fmt: skip
        whole = _meant(graph, decisions, alone, part_of(_part(cluster, stage), 1))
        for words in parameter_differences(programs, whole):
            yield Irregular(Kind.LAYOUT, words)
        return
    operators = operator_differences(programs, meant, names)
    for words in (*parameter_differences(programs, meant), *operators):
        yield Irregular(Kind.LAYOUT, words)
    there = links(programs[usual].roles, programs[usual].pcg.decisions.mesh)
    here = links(meant.roles, meant.pcg.decisions.mesh)
    for role in sorted(there.keys() & here.keys()):
        if there[role] != here[role] and _size(there[role]) == _size(here[role]):
            neighbors = sorted(stride for stride, _ in there[role])
            usually = sorted(stride for stride, _ in here[role])
            yield Irregular(
                Kind.ORDER,
                f"{role}-parallel ranks are {_apart(neighbors)} apart, not {_apart(usually)}",
            )


def _size(axes: frozenset[tuple[int, int]]) -> int:
    return prod(size for _, size in axes)


def _apart(strides: Sequence[int]) -> str:
    return " and ".join(map(str, strides))


def _part(cluster: Cluster, stage: Stage) -> Cluster:
    """The devices of a stage."""
    devices = devices_of(stage)
    own = part_with(cluster, devices).cluster
    return own if own.num_devices == len(devices) else part_of(own, len(devices))


def _meant(graph: Graph, decisions: Decisions, chosen: Configuration, part: Cluster) -> Program:
    """The whole model as `chosen` means it, on the devices of a stage."""
    laid = laid_out(graph, replace(chosen, pipeline=1, interleave=1), part)
    blocks = tuple(text for text in decisions.rewrites if BLOCK.fullmatch(text))
    found = replace(
        laid.decisions(chosen),
        rewrites=(*laid.rewrites, *blocks),
        activations=(),
        batch_semantics=decisions.batch_semantics,
        batch_norm=decisions.batch_norm,
    )
    pcg = lower(rewritten(graph, found.rewrites), found)
    return Program(pcg, {axis.name: OF_CONFIGURATIONS[axis.name] for axis in found.mesh.axes})


def _recompute(graph: Graph, decisions: Decisions, calls: Sequence[Call]) -> Recompute:
    decided = {own.prefix: own for own in decisions.activations if own.policy == "recompute"}
    whole = tuple(c.prefix in decided and not decided[c.prefix].lists for c in calls)
    listed = [call for call in calls if call.prefix in decided and decided[call.prefix].lists]
    some = tuple(
        f"{call.prefix}.{name.lstrip(':')}"
        for call in listed
        for name in (*decided[call.prefix].values, *decided[call.prefix].moves)
    )
    cheap = len(listed) == len(calls) > 0 and all(
        decided[call.prefix].values == tuple(sorted(cheap_operators(graph, call)))
        or set(decided[call.prefix].values) == set(cheap_operators(graph, call))
        for call in calls
    )
    return Recompute(whole, some, cheap)


def _dtype(graph: Graph) -> str:
    """The dtype of most elements of weights."""
    found = Counter[str]()
    for entry in graph.of_kind("parameter"):
        if entry.value.spec.is_float:
            found[entry.value.spec.dtype] += entry.value.spec.num_elements
    return found.most_common(1)[0][0] if found else "float32"
