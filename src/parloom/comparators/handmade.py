"""Published runs: a configuration with a pipeline, as a program that is priced and simulated.

A pipeline cuts the run of equal blocks into stages, each a graph with decisions of its own, which
are lowered, priced and simulated as any plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from parloom.comparators.configuration import RECOMPUTE, Configuration, laid_out
from parloom.comparators.tensor_parallel import TENSOR
from parloom.cost.actions import StageWriter
from parloom.cost.kernels import Kernels
from parloom.cost.parameters import Parameters
from parloom.cost.pipeline import (
    Edge,
    Send,
    Shared,
    StageActions,
    action_lists,
    play_stage,
    send,
    simulate_pipeline,
)
from parloom.cost.simulate import Simulator, simulate
from parloom.cost.step import priced
from parloom.cost.timeline import Timeline
from parloom.errors import InputError
from parloom.ir.graph import DTYPE_BYTES, Graph
from parloom.ir.layout import local_shape
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.ops.experts import NAME as EXPERTS
from parloom.ir.pcg import PCG
from parloom.ir.plan import (
    Decisions,
    Optimizer,
)
from parloom.ir.regular_parts import Join, crossed
from parloom.ir.repeat import run_of, shared_parameters, stage
from parloom.ir.schedules import SPLIT
from parloom.rewrite.rewrites import rewritten


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
    own = part_of(cluster, chosen.ranks // chosen.pipeline)
    if chosen.pipeline == 1:
        return (_part(graph, chosen, own),)
    run = run_of(graph)
    known: dict[object, Part] = {}
    parts = []
    begin = 0
    stages = chosen.pipeline * chosen.interleave
    every = RECOMPUTE[chosen.recompute] or 1
    # A rank counts the blocks of its chunks together, from those of the ranks before it on.
    counted: list[int] = []
    for index, count in enumerate(divided(run.last - run.first + 1, stages)):
        ends = index == 0, index == stages - 1
        counted.append(begin if index < chosen.pipeline else counted[index - chosen.pipeline])
        first = counted[index] % every
        key = ends, count, first
        if key not in known:
            calls = range(begin, begin + count)
            known[key] = _part(stage(graph, calls, ends), chosen, own, first)
        parts.append(known[key])
        counted[index] += count
        begin += count
    return tuple(parts)


def _part(graph: Graph, chosen: Configuration, cluster: Cluster, first: int = 0) -> Part:
    return Part(graph, laid_out(graph, chosen, cluster).decisions(chosen, first))


def divided(blocks: int, stages: int) -> list[int]:
    """Blocks of every stage: equally many, or one fewer at both ends, where embedding and loss
    stand for one each (Megatron-LM, DeepSpeed); otherwise the first stages take what is left over.

    Raises `InputError` where there are fewer blocks than stages.
    """
    if blocks % stages and not (blocks + 2) % stages:
        each = (blocks + 2) // stages
        return [each - (index in (0, stages - 1)) for index in range(stages)]
    if blocks < stages:
        raise InputError(f"{blocks} blocks do not make {stages} stages")
    return [blocks // stages + (index < blocks % stages) for index in range(stages)]


@dataclass(frozen=True, slots=True)
class Program:
    """A plan by hand, lowered: a part and its parallel program per stage; `shared` are the
    parameters that several stages may have.
    """

    chosen: Configuration
    parts: tuple[Part, ...]
    lowered: tuple[PCG, ...]
    shared: frozenset[str] = frozenset()

    def play(
        self,
        cluster: Cluster,
        kernels: Kernels | None = None,
        optimizer: Optimizer | None = None,
        *,
        rounds: int | None = None,
    ) -> Timeline:
        """Price and simulate a step on `cluster`; a run of many steps shows its `period_s`.

        With `rounds`, a pipeline runs no more than so many microbatches for each of its ranks: less
        than the step, and quicker to see what changes it.
        """
        chosen = self.chosen
        own = part_of(cluster, chosen.ranks // chosen.pipeline)
        if len(self.parts) == 1:
            return simulate(self.lowered[0], own, self.parts[0].decisions, optimizer, kernels)
        player, name = Simulator(), chosen.schedule_name
        count = min(chosen.num_microbatches, (rounds or chosen.num_microbatches) * chosen.pipeline)
        known: dict[int, StageActions] = {}
        stages: list[StageActions] = []
        parameters: dict[int, Parameters] = {}
        for index, (part, pcg) in enumerate(zip(self.parts, self.lowered, strict=True)):
            if id(pcg) not in known:
                found = StageWriter(pcg, own, priced(pcg, own, part.decisions, optimizer, kernels))
                # Chunks take turns: a rank runs as many microbatches of the others before.
                found.passes_before = chosen.pipeline if chosen.interleave > 1 else 1
                known[id(pcg)] = play_stage("", found, player, split=name in SPLIT)
                parameters[id(pcg)] = found.found.parameters
            actions = replace(known[id(pcg)], name=f"stage {index}", num_microbatches=count)
            stages.append(actions)
        # What goes back is what came.
        sent = [_send(i, pcg, chosen, cluster) for i, pcg in enumerate(self.lowered[:-1])]
        edges = [Edge(index, index + 1, each, each) for index, each in enumerate(sent)]
        lists = action_lists(name, stages, count, chosen.interleave, edges)
        shared = self._shared([parameters[id(pcg)] for pcg in self.lowered], cluster)
        synchronizes = chosen.synchronizes
        return simulate_pipeline(lists, stages, edges, shared=shared, synchronizes=synchronizes)

    def _shared(self, stages: Sequence[Parameters], cluster: Cluster) -> tuple[Shared, ...]:
        """Weights that several stages have; those that the same stages have travel together."""
        sizes: dict[tuple[int, ...], int] = {}
        for name in sorted(self.shared):
            held = {
                index: parameters.stored_of(parameters.by_name[name]).get("gradients", 0)
                for index, parameters in enumerate(stages)
                if name in parameters.by_name
            }
            sizes[tuple(held)] = sizes.get(tuple(held), 0) + max(held.values())
        found = []
        for holders, size in sizes.items():
            ring = len({index % self.chosen.pipeline for index in holders})
            level = _crossed(holders, self.chosen, cluster)
            moved = 2 * (ring - 1) / ring * size
            found.append(Shared(holders, send(moved, moved, Join(cluster, level))))
        return tuple(found)


def communicators(chosen: Configuration) -> int:
    """How many groups of ranks a device sends in: per axis, to other stages, and all of them."""
    axes = chosen.tensor, chosen.pipeline, chosen.context, chosen.copies, chosen.data
    return sum(size > 1 for size in axes) + (chosen.expert > 1) + (chosen.ranks > 1)


def program(graph: Graph, chosen: Configuration, cluster: Cluster) -> Program:
    """The plan for `chosen`, lowered; see `plan` for what it raises."""
    parts = plan(graph, chosen, cluster)
    known: dict[int, PCG] = {}
    for part in parts:
        if id(part) not in known:
            padded = rewritten(part.graph, part.decisions.rewrites)
            known[id(part)] = lower(padded, part.decisions)
    shared = shared_parameters(graph) if len(parts) > 1 else frozenset[str]()
    return Program(chosen, parts, tuple(known[id(part)] for part in parts), shared)


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
    size = _sent_bytes(pcg)
    return send(size, size, Join(cluster, _crossed((index, index + 1), chosen, cluster)))


def _crossed(stages: Sequence[int], chosen: Configuration, cluster: Cluster) -> int:
    """The level that joins the ranks of some stages."""
    devices = cluster.num_devices // chosen.pipeline
    return crossed([[stage % chosen.pipeline * devices] for stage in stages], cluster)
