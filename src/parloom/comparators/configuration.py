"""A plan as the field writes it (tp, dp, ZeRO, ...), and the decisions about a graph that it means.

Tensor parallelism puts its axis on the weights as Megatron-LM does, sequence parallelism on the
positions between (Korthikanti et al., 2022), context parallelism on all positions, data parallelism
on samples, expert parallelism on the experts, over some of the ranks that share the samples; ZeRO
(Rajbhandari et al., SC'20) shards storage over the data axis or a part of it.
Ranks are numbered as the field does: tensor fastest, then context, experts, data, pipeline.
"""

from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType

from parloom.comparators.tensor_parallel import LOOKUPS, TENSOR, WEIGHT_OPS, Megatron
from parloom.cost.kernels import ATTENTION, PRODUCTS
from parloom.errors import InputError
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Call, Graph, Node
from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import Cluster, Mesh, MeshAxis, PrimeAxis
from parloom.ir.ops import Rule, op_of
from parloom.ir.ops.experts import NAME as EXPERTS
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    ParameterDecision,
    Storage,
    one_stage,
)
from parloom.rewrite.pad import paddings
from parloom.rewrite.regions import regions
from parloom.rewrite.rewrites import rewritten
from parloom.rewrite.stripes import Stripe
from parloom.search.spread import Assignment, Unfolded, decisions, followed, spread, unfold

DATA, CONTEXT, COPY, EXPERT, REPLICA = "data", "context", "copy", "expert", "replica"
SELECTIVE = "selective"
BATCHED = PRODUCTS.keys() - WEIGHT_OPS
# Of how many blocks one is recomputed as a whole.
RECOMPUTE: Mapping[str, int] = MappingProxyType(
    {"none": 0, SELECTIVE: 0, "quarter": 4, "alternate": 2, "full": 1}
)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A plan as the field writes it.

    `copies` ranks do the same work, where a batch does not divide over all. `shard` ranks of the
    data-parallel ones, each with its context-parallel ones and copies, share what ZeRO `zero` (0 to
    3) shards; 0 is all. `expert` ranks share the experts: of the data-parallel ones, or where that
    is more of them, all of these with their tensor-parallel ones. Context-parallel ones have chunks
    of the positions one after the other, or every so manyth (`striped`); keys and values are
    gathered, or their blocks go around a `ring`. `recompute`: none of the blocks, every fourth one,
    every other one, all, or of each what is cheap (`cheap_operators`). `microbatch` samples a rank
    at a time; `interleave` chunks of the model a pipeline rank. `schedule` of the pipeline, by its
    name in `ir/schedules.py`; "" is 1F1B, interleaved where there are chunks. `synchronizes`: ranks
    wait for each other before they update weights (see `cost/pipeline.py`). dtypes as in
    `Decisions`. `pads`: a vocabulary that does not divide over the tensor-parallel ranks is padded;
    otherwise they all have the whole of it.
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
    copies: int = 1
    ring: bool = False
    striped: bool = False
    schedule: str = ""
    synchronizes: bool = True
    pads: bool = True

    @property
    def schedule_name(self) -> str:
        """The schedule of the pipeline."""
        return self.schedule or ("interleaved_1f1b" if self.interleave > 1 else "1f1b")

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.copies * self.data * self.pipeline

    @property
    def words(self) -> tuple[str, ...]:
        """What neither a mesh nor stages say, for tables: "ZeRO-1", "2 microbatches"."""
        several = self.num_microbatches > 1 and self.pipeline == 1
        said = (
            f"ZeRO-{self.zero}" if self.zero and self.data * self.context * self.copies > 1 else "",
            "sequence parallel" if self.sequence_parallel else "",
            "ring attention" if self.ring and self.context > 1 else "",
            "striped positions" if self.striped and self.context > 1 else "",
            f"{self.num_microbatches} microbatches" if several else "",
            f"{self.interleave} chunks" if self.interleave > 1 else "",
            f"{self.recompute} recomputation" if self.recompute != "none" else "",
            self.schedule,
        )
        return tuple(word for word in said if word)

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
class LaidOut:
    """A graph with an assignment for every operator of `program`, that of the rewritten graph."""

    graph: Graph
    program: Unfolded
    assignments: tuple[Assignment, ...]
    rewrites: tuple[str, ...]

    def decisions(self, chosen: Configuration, first: int = 0) -> Decisions:
        """The plan for `chosen`, of which this is the layout; the first block counts as number
        `first` where not all are recomputed.
        """
        modules = regions(self.graph) if chosen.recompute != "none" else ()
        blocks = tuple(f"block {module}" for module in modules)
        graph = rewritten(self.graph, blocks)
        return Decisions(
            one_stage(self.program.mesh),
            decisions(self.program, list(self.assignments)),
            tuple(_storage(self.program, self.assignments, chosen)),
            tuple(_activations(graph, chosen.recompute, first)),
            num_microbatches=chosen.num_microbatches,
            rewrites=(*self.rewrites, *blocks),
            master_dtype=chosen.master_dtype,
            reduce_dtype=chosen.reduce_dtype,
        )


def laid_out(
    graph: Graph, chosen: Configuration, cluster: Cluster, factored: Factored | None = None
) -> LaidOut:
    """The layouts of `chosen` on `cluster`, a pipeline's stage of it.

    Raises `InputError` where the configuration does not fit the cluster, the graph or its batch.
    """
    mesh = mesh_of(chosen, cluster)
    found = paddings(graph, chosen.tensor) if chosen.pads else ()
    rewrites = tuple(str(own) for own in (*found, *_stripes(graph, chosen)))
    padded = rewritten(graph, rewrites)
    known = factored if factored is not None and not rewrites else factorize(padded)
    program = unfold(padded, known, mesh)
    seeds = _seeds(padded, chosen, mesh)
    assignments = spread(program, seeds, _ByHand(program, chosen))
    return LaidOut(graph, program, tuple(assignments), rewrites)


def mesh_of(chosen: Configuration, cluster: Cluster) -> Mesh:
    """Tensor on the fastest links, then context, copies and data: experts', ZeRO's, other ranks."""
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
        (COPY, chosen.copies),
        (EXPERT, experts),
        (DATA, shard // experts),
        (REPLICA, chosen.data // shard),
    )
    for name, size in sizes:
        taken = _take(primes, size, cluster)
        if taken:
            axes.append(MeshAxis(name, tuple(reversed(taken))))
    return Mesh(tuple(reversed(axes)) or (MeshAxis(DATA, (PrimeAxis(1, 1, 0),)),))


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


def num_samples(graph: Graph) -> int:
    """The size of the first dim of the first batch tensor that has one."""
    shapes = (entry.value.spec.shape for entry in graph.of_kind("batch"))
    return next((shape[0] for shape in shapes if shape), 1)


def num_positions(graph: Graph) -> int:
    """Of each sample; 0 where no batch tensor is token ids [samples, positions], or activations of
    a pipeline's stage [samples, positions, width].
    """
    specs = (entry.value.spec for entry in graph.of_kind("batch"))
    return next((s.shape[1] for s in specs if len(s.shape) == (3 if s.is_float else 2)), 0)


def _seeds(graph: Graph, chosen: Configuration, mesh: Mesh) -> dict[str, Layout]:
    """Samples over the data axes, positions over the context axis."""
    seeds = {}
    entries = [entry for entry in graph.of_kind("batch") if entry.value.spec.shape]
    samples = chosen.samples
    if any(entry.samples is not None for entry in entries):  # the graph is of one microbatch
        samples //= chosen.num_microbatches
    for entry in entries:
        shape = entry.value.spec.shape
        if shape[0] != num_samples(graph):
            continue
        if shape[0] != samples:
            raise InputError(
                f"batch tensor {entry.target!r} of shape {shape}: not {samples} samples"
            )
        shards, left = [], shape[0]
        for name in (REPLICA, DATA, EXPERT):
            if name in mesh.names and mesh[name].size > 1:
                left //= mesh[name].size
                shards.append(Shard(name, 0, left))
        if CONTEXT in mesh.names and len(shape) > 1:
            if shape[1] % chosen.context:
                raise InputError(
                    f"batch tensor {entry.target!r} of shape {shape}: its positions do not divide"
                    f" over {chosen.context} context-parallel ranks"
                )
            shards.append(Shard(CONTEXT, 1, 1 if chosen.striped else shape[1] // chosen.context))
        seeds[entry.value.name] = Layout(tuple(shards))
    return seeds


def _stripes(graph: Graph, chosen: Configuration) -> Iterator[Stripe]:
    """The cuts that stripes need: of the positions of all batch tensors that have some."""
    for entry in graph.of_kind("batch"):
        shape = entry.value.spec.shape
        sampled = len(shape) > 1 and shape[0] == num_samples(graph)
        if chosen.striped and chosen.context > 1 and sampled:
            yield Stripe(entry.target, 1, chosen.context)


def _storage(
    program: Unfolded, assignments: tuple[Assignment, ...], chosen: Configuration
) -> Iterator[ParameterDecision]:
    """ZeRO 1 shards the optimizer's states, 2 gradients, too, and 3 weights.

    Over all ranks that have the same weights: context-parallel ones, too (Megatron-LM's data-
    parallel group with context parallelism; torchtitan's dp_shard_cp), and those of other experts.
    """
    mesh = program.mesh
    over = [a for a in (DATA, EXPERT, CONTEXT, COPY) if a in mesh.names and mesh[a].size > 1]
    if not chosen.zero or not over:
        return
    taken: dict[str, set[str]] = {}
    for index, assignment in enumerate(assignments):
        for position, name in enumerate(program.nodes[index].operands):
            if name in program.parameters:
                layout = program.operand_layout(index, position, assignment)
                taken.setdefault(name, set()).update(layout.axes)
    for entry in program.graph.of_kind("parameter"):
        axes = tuple(a for a in over if a not in taken.get(entry.value.name, ()))
        if entry.value.spec.shape and axes:
            shared, none = Storage(axes), Storage()
            weight, gradient = (shared if chosen.zero >= level else none for level in (3, 2))
            yield ParameterDecision(entry.target, weight, gradient, shared)


def _activations(graph: Graph, recompute: str, first: int) -> Iterator[ActivationDecision]:
    """What blocks recompute; those that the user's model checkpoints do in any case."""
    asked = frozenset(graph.recomputed_calls)
    calls = [item for item in graph.main.body if isinstance(item, Call)]
    every = RECOMPUTE[recompute]
    cheap: dict[str, tuple[str, ...]] = {}
    for index, call in enumerate(calls, first):
        if call.prefix in asked or (every and index % every == 0):
            yield ActivationDecision(call.prefix, "recompute")
        elif recompute == SELECTIVE:
            if call.function not in cheap:
                cheap[call.function] = cheap_operators(graph, call)
            if cheap[call.function]:
                yield ActivationDecision(call.prefix, "recompute", cheap[call.function])


def cheap_operators(graph: Graph, call: Call) -> tuple[str, ...]:
    """The operators of a block that are neither products with weights nor attention in one kernel.

    They take little time and hold most of what a block keeps: scores and probabilities of attention
    (Korthikanti et al., 2022, section 5), norms, activation functions.
    """
    function = graph.by_name[call.function]
    weights = {entry.value.name for entry in graph.of_kind("parameter")}
    formal = zip(call.args, function.inputs, strict=True)
    own = {value.name for name, value in formal if name in weights}
    return tuple(
        item.key for item in function.body
        if isinstance(item, Node) and not op_of(item).view and not _is_dear(item, own)
    )  # fmt: skip


def _is_dear(node: Node, weights: set[str]) -> bool:
    if node.op in (ATTENTION, EXPERTS):
        return True
    return node.op in PRODUCTS and not weights.isdisjoint(node.refs)


def experts_of(program: Unfolded, index: int) -> tuple[str, ...]:
    """The factors of the experts of an operator: of a mixture, or of a product of tokens and
    weights that both have a dim for experts (Lepikhin et al., 2020, algorithm 2).
    """
    flat, rule = program.nodes[index], program.rules[index]
    if flat.node.op == EXPERTS:
        return rule.operands[3][0]  # the numbers of the experts
    weights = [name in program.parameters for name in flat.operands]
    if flat.node.op not in BATCHED or not any(weights):
        return ()
    every = [{f for dim in dims for f in dim} for dims in (*rule.operands, *rule.results)]
    return tuple(f for f in rule.shardable if all(f in factors for factors in every))


def num_experts(program: Unfolded) -> int:
    """What all numbers of experts have in common; 0 where there are none."""
    found = (
        (program.rules[index].size(f) for f in experts_of(program, index))
        for index in range(len(program.nodes))
    )
    return gcd(*(max(sizes, default=0) for sizes in found))


class _ByHand:
    """Megatron's choice for products and lookups; with sequence parallelism, positions between.
    Experts are divided, and tokens travel to them.
    """

    def __init__(self, program: Unfolded, chosen: Configuration) -> None:
        self.program, self.megatron = program, Megatron(program)
        self.experts, self.ring = chosen.expert_axes, chosen.ring
        self.lay: dict[str, str] = {}  # by result of experts, their tokens
        self.between = chosen.sequence_parallel and TENSOR in program.mesh.names
        self.sequence = num_positions(program.graph)

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
        if flat.node.op == EXPERTS or (self.experts and experts_of(self.program, index)):
            assignment = self._divided(index, assignment)
        if flat.node.op == ATTENTION and self.ring:
            assignment = _around(rule, assignment)
        if TENSOR not in self.program.mesh.names:
            return assignment
        weighs = flat.node.op in WEIGHT_OPS or flat.node.op in LOOKUPS
        if not self.between or flat.node.op == EXPERTS:
            return self.megatron(index, assignment, layouts)
        if weighs:
            # Positions are gathered in front of products.
            if self._splits_activations(index, assignment):
                assignment = without(assignment, (TENSOR,))
            return self.megatron(index, assignment, layouts)
        if any(TENSOR in axes for axes in assignment.values()):
            return assignment
        for factor in self._positions(index):
            axes = (*assignment.get(factor, ()), TENSOR)
            if factor in rule.shardable and rule.size(factor) % self.program.mesh.size(axes) == 0:
                return assignment | {factor: axes}
        return assignment

    def _divided(self, index: int, assignment: Assignment) -> Assignment:
        """Experts over their axes. Tokens stay on these where the operator routes them, and on
        others, but not on the tensor axis.
        """
        node, rule = self.program.nodes[index].node, self.program.rules[index]
        ranks = self.program.mesh.size(self.experts)
        if ranks == 1:
            return without(assignment, (TENSOR,))
        for experts in experts_of(self.program, index):
            if rule.size(experts) % ranks == 0:
                break
        else:
            raise InputError(f"{node.key}: its experts do not divide over {ranks} ranks")
        moved = {f for pair in rule.routes if experts in pair for f in pair} - {experts}
        found = {experts: self.experts}
        for factor, axes in without(assignment, {TENSOR} - {*self.experts}).items():
            stays = axes if factor in moved else tuple(a for a in axes if a not in self.experts)
            if stays and factor != experts:
                found[factor] = stays
        return found

    def _splits_activations(self, index: int, assignment: Assignment) -> bool:
        """Whether the tensor axis is on a factor that no weight of an operator has."""
        rule, operands = self.program.rules[index], self.program.nodes[index].operands
        own = {
            factor
            for name, dims in zip(operands, rule.operands, strict=True)
            if name in self.program.parameters
            for dim in dims
            for factor in dim
        }
        return any(TENSOR in axes for factor, axes in assignment.items() if factor not in own)

    def _positions(self, index: int) -> tuple[str, ...]:
        """The factor of the positions of an activation [samples, positions, ...]."""
        flat, rule = self.program.nodes[index], self.program.rules[index]
        shape = flat.node.results[0].spec.shape
        if len(shape) < 3 or shape[1] != self.sequence or not flat.node.results[0].spec.is_float:
            return ()
        return rule.results[0][1]


def _around(rule: Rule, assignment: Assignment) -> Assignment:
    """An assignment of attention with the context axis on the keys as it is on the queries."""
    found = dict(assignment)
    for queries, keys in rule.routes:
        if CONTEXT in assignment.get(queries, ()):
            found[keys] = (CONTEXT,)
    return found


def without(assignment: Assignment, gone: Collection[str]) -> Assignment:
    """An assignment without some axes."""
    bare = {f: tuple(a for a in axes if a not in gone) for f, axes in assignment.items()}
    return {f: axes for f, axes in bare.items() if axes}
