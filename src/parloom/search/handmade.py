"""Plans by hand: a published configuration (tp, pp, dp, ZeRO, ...) as decisions about a graph.

Tensor parallelism puts its axis on the weights as `megatron` does, sequence parallelism on the
positions between (Korthikanti et al., 2022), context parallelism on all positions, data parallelism
on samples, expert parallelism on the experts, over some of the ranks that share the samples; ZeRO
shards storage over the data axis or a part of it. A pipeline cuts the run of equal blocks into
stages, each a graph with decisions of its own, which are lowered, priced and simulated as any plan.
Ranks are numbered as the field does: tensor fastest, then context, experts, data, pipeline.
"""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from parloom.cost.actions import Stage
from parloom.cost.kernels import Kernels
from parloom.cost.pipeline import Send, StageActions, play_stage, send, simulate_pipeline
from parloom.cost.simulate import Simulator, simulate
from parloom.cost.step import priced
from parloom.cost.timeline import Timeline
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import DTYPE_BYTES, Call, Graph
from parloom.ir.layout import Layout, Shard, local_shape
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh, MeshAxis, PrimeAxis, part_of
from parloom.ir.ops.experts import NAME as EXPERTS
from parloom.ir.pcg import PCG
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    Optimizer,
    ParameterDecision,
    Storage,
)
from parloom.ir.repeat import run_of, stage
from parloom.ir.schedules import schedule
from parloom.rewrite.pad import paddings
from parloom.rewrite.rewrites import rewritten
from parloom.search.baselines import DATA, LOOKUPS, TENSOR, WEIGHT_OPS, Megatron
from parloom.search.spread import Assignment, Unfolded, decisions, followed, spread, unfold

CONTEXT, EXPERT, REPLICA = "context", "expert", "replica"
# Of how many blocks one is recomputed.
RECOMPUTE: Mapping[str, int] = MappingProxyType({"none": 0, "alternate": 2, "full": 1})


@dataclass(frozen=True, slots=True)
class Configuration:
    """A plan as the field writes it.

    `shard` ranks of the data-parallel ones, each with its context-parallel ones, share what ZeRO
    `zero` (0 to 3) shards; 0 is all. `expert` ranks share the experts: of the data-parallel ones,
    or where that is more of them, all of these with their tensor-parallel ones. `recompute`: none
    of the blocks, every other one, or all. `microbatch` samples a rank at a time; `interleave`
    chunks of the model a pipeline rank. dtypes as in `Decisions`.
    """

    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 0
    shard: int = 0
    recompute: str = "none"
    microbatch: int = 1
    num_microbatches: int = 1
    sequence_parallel: bool = False
    master_dtype: str | None = "float32"
    reduce_dtype: str | None = None

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def samples(self) -> int:
        """The global batch."""
        return self.data * self.microbatch * self.num_microbatches

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The mesh axes that experts are divided over."""
        if self.expert == 1:
            return ()
        if self.expert <= self.data:
            return (EXPERT,)
        return (EXPERT, TENSOR) if self.data > 1 else (TENSOR,)


@dataclass(frozen=True, slots=True)
class Part:
    """The program of a pipeline stage; a plan without a pipeline is one part."""

    graph: Graph
    decisions: Decisions


def plan(graph: Graph, chosen: Configuration, cluster: Cluster) -> tuple[Part, ...]:
    """A part per stage, in order; equal stages in the middle are one value.

    Raises `InputError` where the configuration does not fit the cluster, the graph or its batch.
    """
    if chosen.ranks != cluster.num_devices:
        raise InputError(f"{chosen.ranks} ranks for the {cluster.num_devices} of {cluster.name}")
    if chosen.expert > 1 and not any(flat.node.op == EXPERTS for flat in graph.flat()):
        raise InputError(f"experts over {chosen.expert} ranks: {graph.name} has none")
    mesh = mesh_of(chosen, part_of(cluster, chosen.ranks // chosen.pipeline))
    if chosen.pipeline == 1:
        return (_part(graph, chosen, mesh),)
    run = run_of(graph)
    known: dict[object, Part] = {}
    parts = []
    begin = 0
    stages = chosen.pipeline * chosen.interleave
    for index, count in enumerate(_divided(run.last - run.first + 1, stages)):
        ends = index == 0, index == stages - 1
        key = ends, count
        if key not in known:
            known[key] = _part(stage(graph, range(begin, begin + count), ends), chosen, mesh)
        parts.append(known[key])
        begin += count
    return tuple(parts)


def _divided(blocks: int, stages: int) -> list[int]:
    """Blocks of every stage: equally many, or one fewer at both ends, where embedding and loss
    stand for one each (Megatron-LM, DeepSpeed); otherwise the first stages take what is left over.
    """
    if blocks % stages and not (blocks + 2) % stages:
        each = (blocks + 2) // stages
        return [each - (index in (0, stages - 1)) for index in range(stages)]
    if blocks < stages:
        raise InputError(f"{blocks} blocks do not make {stages} stages")
    return [blocks // stages + (index < blocks % stages) for index in range(stages)]


@dataclass(frozen=True, slots=True)
class Program:
    """A plan by hand, lowered: a part and its parallel program per stage."""

    chosen: Configuration
    parts: tuple[Part, ...]
    lowered: tuple[PCG, ...]

    def play(
        self,
        cluster: Cluster,
        kernels: Kernels | None = None,
        optimizer: Optimizer | None = None,
        *,
        rounds: int | None = None,
    ) -> Timeline:
        """Price and simulate a step on `cluster`.

        With `rounds`, a pipeline runs no more than so many microbatches for each of its ranks: less
        than the step, and quicker to see what changes it.
        """
        chosen = self.chosen
        own = part_of(cluster, chosen.ranks // chosen.pipeline)
        if len(self.parts) == 1:
            return simulate(self.lowered[0], own, self.parts[0].decisions, optimizer, kernels)
        player = Simulator()
        known: dict[int, StageActions] = {}
        stages: list[StageActions] = []
        for index, (part, pcg) in enumerate(zip(self.parts, self.lowered, strict=True)):
            if id(pcg) not in known:
                found = Stage(pcg, own, priced(pcg, own, part.decisions, optimizer, kernels))
                known[id(pcg)] = play_stage("", found, player)
            actions = replace(known[id(pcg)], name=f"stage {index}")
            sent = _send(index, pcg, chosen, cluster) if index + 1 < len(self.parts) else Send()
            # What goes back is what came.
            came = stages[-1].forward if stages else Send()
            stages.append(replace(actions, forward=sent, backward=came))
        name = "interleaved_1f1b" if chosen.interleave > 1 else "1f1b"
        count = min(chosen.num_microbatches, (rounds or chosen.num_microbatches) * chosen.pipeline)
        lists = schedule(name, len(stages), count, chosen.interleave)
        return simulate_pipeline(lists, stages)


def program(graph: Graph, chosen: Configuration, cluster: Cluster) -> Program:
    """The plan for `chosen`, lowered; see `plan` for what it raises."""
    parts = plan(graph, chosen, cluster)
    known: dict[int, PCG] = {}
    for part in parts:
        if id(part) not in known:
            padded = rewritten(part.graph, part.decisions.rewrites)
            known[id(part)] = lower(padded, part.decisions)
    return Program(chosen, parts, tuple(known[id(part)] for part in parts))


def mesh_of(chosen: Configuration, cluster: Cluster) -> Mesh:
    """Tensor on the fastest links, then context, then data: experts', ZeRO's, and other ranks."""
    shard, experts = chosen.shard or chosen.data, chosen.expert
    if experts > chosen.data:
        if experts != chosen.data * chosen.tensor:
            raise InputError(
                f"experts over {experts} ranks: neither a part of the {chosen.data} data-parallel"
                f" ones nor all {chosen.data * chosen.tensor} with their tensor-parallel ones"
            )
        experts = chosen.data
    if chosen.data % shard or shard % experts:
        over = f", of which {experts} share the experts" if experts > 1 else ""
        raise InputError(f"ZeRO over {shard} of {chosen.data} data-parallel ranks{over}")
    primes = list(cluster.prime_axes())
    axes = []
    sizes = (
        (TENSOR, chosen.tensor),
        (CONTEXT, chosen.context),
        (EXPERT, experts),
        (DATA, shard // experts),
        (REPLICA, chosen.data // shard),
    )
    for name, size in sizes:
        taken = _take(primes, size, cluster)
        if taken or name == DATA:
            axes.append(MeshAxis(name, tuple(reversed(taken)) or (PrimeAxis(1, 1, 0),)))
    return Mesh(tuple(reversed(axes)))


def _take(primes: list[PrimeAxis], size: int, cluster: Cluster) -> list[PrimeAxis]:
    taken, left = [], size
    for prime in list(primes):
        if left % prime.size == 0:
            taken.append(prime)
            primes.remove(prime)
            left //= prime.size
    if left > 1:
        raise InputError(f"an axis of {size} is no product of the links of {cluster.name}")
    return taken


def _part(graph: Graph, chosen: Configuration, mesh: Mesh) -> Part:
    rewrites = tuple(str(p) for p in paddings(graph, chosen.tensor))
    padded = rewritten(graph, rewrites)
    program = unfold(padded, factorize(padded), mesh)
    seeds = _seeds(padded, chosen, mesh)
    assignments = spread(program, seeds, _ByHand(program, chosen))
    prefixes = [i.prefix for i in graph.main.body if isinstance(i, Call)]
    every = RECOMPUTE[chosen.recompute]
    recomputed = prefixes[::every] if every else []
    made = Decisions(
        mesh,
        decisions(program, assignments),
        _storage(program, assignments, chosen),
        tuple(ActivationDecision(prefix, "recompute") for prefix in recomputed),
        num_microbatches=chosen.num_microbatches,
        rewrites=rewrites,
        master_dtype=chosen.master_dtype,
        reduce_dtype=chosen.reduce_dtype,
    )
    return Part(graph, made)


def _seeds(graph: Graph, chosen: Configuration, mesh: Mesh) -> dict[str, Layout]:
    """Samples over the data axes, positions over the context axis."""
    seeds = {}
    for entry in graph.of_kind("batch"):
        shape = entry.value.spec.shape
        if not shape or shape[0] != chosen.samples:
            raise InputError(
                f"batch tensor {entry.target!r} of shape {shape}: not {chosen.samples} samples"
            )
        shards, left = [], shape[0]
        for name in (REPLICA, DATA, EXPERT):
            if name in mesh.names and mesh[name].size > 1:
                left //= mesh[name].size
                shards.append(Shard(name, 0, left))
        if CONTEXT in mesh.names and len(shape) > 1:
            shards.append(Shard(CONTEXT, 1, shape[1] // chosen.context))
        seeds[entry.value.name] = Layout(tuple(shards))
    return seeds


def _storage(
    program: Unfolded, assignments: list[Assignment], chosen: Configuration
) -> tuple[ParameterDecision, ...]:
    """ZeRO 1 shards the optimizer's states, 2 gradients, too, and 3 weights.

    Over all ranks that have the same weights: context-parallel ones, too (Megatron-LM's data-
    parallel group with context parallelism; torchtitan's dp_shard_cp), and those of other experts.
    """
    mesh = program.mesh
    over = [a for a in (DATA, EXPERT, CONTEXT) if a in mesh.names and mesh[a].size > 1]
    if not chosen.zero or not over:
        return ()
    taken: dict[str, set[str]] = {}
    for flat, rule, assignment in zip(program.nodes, program.rules, assignments, strict=True):
        for position, name in enumerate(flat.operands):
            if name in program.parameters:
                layout = rule.operand_layout(position, assignment, mesh)
                taken.setdefault(name, set()).update(layout.axes)
    found = []
    for entry in program.graph.of_kind("parameter"):
        axes = tuple(a for a in over if a not in taken.get(entry.value.name, ()))
        if entry.value.spec.shape and axes:
            shared, none = Storage(axes), Storage()
            weight, gradient = (shared if chosen.zero >= level else none for level in (3, 2))
            found.append(ParameterDecision(entry.target, weight, gradient, shared))
    return tuple(found)


class _ByHand:
    """Megatron's choice for products and lookups; with sequence parallelism, positions between.
    Experts are divided, and see the tokens of all that share them.
    """

    def __init__(self, program: Unfolded, chosen: Configuration) -> None:
        self.program, self.megatron = program, Megatron(program)
        self.experts = chosen.expert_axes
        self.lay: dict[str, str] = {}  # by result of experts, their tokens
        self.between = chosen.sequence_parallel and TENSOR in program.mesh.names
        self.sequence = next(
            (i.value.spec.shape[1] for i in program.graph.of_kind("batch")
             if len(i.value.spec.shape) > 1), 0,
        )  # fmt: skip

    def __call__(
        self, index: int, assignment: Assignment, layouts: Mapping[str, Layout]
    ) -> Assignment:
        flat, rule = self.program.nodes[index], self.program.rules[index]
        for name in self.lay.keys() & set(flat.operands):
            # What experts make is a sum over them, and goes back to where the tokens were.
            lying = ChainMap({name: layouts[self.lay[name]]}, dict(layouts))
            assignment = followed(self.program, index, lying)
        if flat.node.op == EXPERTS:
            self.lay[flat.results[0]] = flat.operands[0]
            assignment = self._divided(index, assignment)
        if TENSOR not in self.program.mesh.names:
            return assignment
        weighs = flat.node.op in WEIGHT_OPS or flat.node.op in LOOKUPS
        if not self.between or flat.node.op == EXPERTS:
            return self.megatron(index, assignment, layouts)
        if weighs:
            # Positions are gathered in front of products.
            on_positions = {f for f, axes in assignment.items() if TENSOR in axes} & set(
                self._positions(index)
            )
            bare = without(assignment, (TENSOR,))
            return self.megatron(index, bare if on_positions else assignment, layouts)
        if any(TENSOR in axes for axes in assignment.values()):
            return assignment
        for factor in self._positions(index):
            axes = (*assignment.get(factor, ()), TENSOR)
            if factor in rule.shardable and rule.size(factor) % self.program.mesh.size(axes) == 0:
                return assignment | {factor: axes}
        return assignment

    def _divided(self, index: int, assignment: Assignment) -> Assignment:
        """Experts over their axes; tokens stay on others, but not on the tensor axis."""
        node, rule = self.program.nodes[index].node, self.program.rules[index]
        ranks = self.program.mesh.size(self.experts)
        bare = without(assignment, (*self.experts, TENSOR))
        if ranks == 1:
            return bare
        for factor in rule.operands[3][0]:  # the numbers of the experts
            if rule.size(factor) % ranks == 0:
                return bare | {factor: self.experts}
        raise InputError(f"{node.key}: its experts do not divide over {ranks} ranks")

    def _positions(self, index: int) -> tuple[str, ...]:
        """The factor of the positions of an activation [samples, positions, ...]."""
        flat, rule = self.program.nodes[index], self.program.rules[index]
        shape = flat.node.results[0].spec.shape
        if len(shape) < 3 or shape[1] != self.sequence or not flat.node.results[0].spec.is_float:
            return ()
        return rule.results[0][1]


def without(assignment: Assignment, gone: tuple[str, ...]) -> Assignment:
    """An assignment without some axes."""
    bare = {f: tuple(a for a in axes if a not in gone) for f, axes in assignment.items()}
    return {f: axes for f, axes in bare.items() if axes}


def _sent_bytes(pcg: PCG) -> float:
    """What each rank sends of a microbatch's activations when they leave a stage.

    Where all ranks of the tensor axis have them, each sends a part (scatter-gather: Narayanan et
    al., SC'21, section 4.1).
    """
    found = 0.0
    for _, value in pcg.outputs:
        shape = local_shape(value.layout, value.spec.shape, pcg.mesh)
        whole = TENSOR in pcg.mesh.names and TENSOR not in value.layout.axes
        size = prod(shape) * DTYPE_BYTES[value.spec.dtype]
        found += size / pcg.mesh[TENSOR].size if whole else size
    return found


def _send(index: int, pcg: PCG, chosen: Configuration, cluster: Cluster) -> Send:
    """What goes from a stage to the next one, over the level that joins the two ranks."""
    devices = cluster.num_devices // chosen.pipeline
    rank = index % chosen.pipeline
    one, other = rank * devices, (rank + 1) % chosen.pipeline * devices
    crossed, below = 0, 1
    for level, found in enumerate(cluster.levels):
        if one // below != other // below:
            crossed = level
        below *= found.size
    return send(_sent_bytes(pcg), crossed, cluster)
