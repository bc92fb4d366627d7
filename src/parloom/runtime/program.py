"""A generated program: specs of its tensors, its schedule, and the functions that compute."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from parloom.action_text import ONCE, read_action
from parloom.errors import VerifyError
from parloom.quantization import BLOCK
from parloom.runtime.context import Context
from parloom.runtime.mesh import Axis, Mesh
from parloom.runtime.sharding import Dims


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor by its global shape, torch dtype name, and the digits of each dim.

    A dim's digits multiply to its size, outermost first: the name of the axis that owns a digit, or
    the size of a local one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dims: Dims


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that goes from one pipeline stage to others, as the ranks of one stage have it.

    `value` is its name in all stages, `spec.name` that under which a forward pass reads it. With
    `flows` its gradient comes back.
    """

    value: str
    spec: TensorSpec
    flows: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """Axes over which a parameter's home shard is cut into chunks along `dim`.

    The axes of each begin those of the next: (), (), () [replicated]; (), (), A [ZeRO-1];
    (), A, A [ZeRO-2]; A, A, A [ZeRO-3, FSDP]; A, A, AB [within nodes, states across all].
    """

    weight: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    dim: int = 0


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter: its home shard (`dims`) and its storage.

    `valid` is the shape that the user knows when `shape` was padded with zeros. `master_dtype` is
    that of the optimizer's copy, when it keeps one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dims: Dims
    storage: Storage = field(default_factory=Storage)
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    master_dtype: str | None = None
    valid: tuple[int, ...] | None = None

    @property
    def user_shape(self) -> tuple[int, ...]:
        """The shape under which the user saves and loads it."""
        return self.shape if self.valid is None else self.valid


@dataclass(frozen=True, slots=True)
class StepNode:
    """What a step does to parameters outside autograd: `kind` over `axes`.

    | action | kind | when | |
    |---|---|---|---|
    | GATHER | all_gather | forward and backward | chunked weights, for the call `unit` ("": main) |
    | REDUCE | reduce_scatter | microbatch, step | gradients become chunks, as they are stored or
    updated |
    | REDUCE | all_reduce | step | gradients, or the chunks that are updated, become whole |
    | STEP | unscale | step | float16 gradients lose the loss scale and are checked |
    | STEP | gradient_norm, update | step | clipping and the optimizer, for all trained parameters |
    | GATHER | all_gather | step | weights of whose stored part each rank updated a chunk |

    A gradient runs through its REDUCE nodes in order. Collectives leave in buckets of about
    `bucket_bytes`; with `unit`, all at once when the unit's backward pass is over. With `dtype`
    they are quantized (`runtime.quantized`).
    """

    action: str
    kind: str
    axes: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    when: str = "step"
    unit: str | None = None
    bucket_bytes: int = 0
    dtype: str = ""

    @property
    def align(self) -> int:
        """Where tensors begin in what travels: at multiples of so many elements."""
        return BLOCK if self.dtype else 1


@dataclass(frozen=True, slots=True)
class Result:
    """What one forward pass leaves: this microbatch's share of the global loss, new buffers, and
    values for later stages.

    `partial` are axes over which `loss` is still a partial sum. A program that ends in `reduce` of
    the loss may leave that to the step, which does it while the backward pass runs: the gradient
    is the same, and no rank waits.
    """

    loss: Tensor
    updates: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    leaving: dict[str, Tensor] = field(default_factory=dict)


Forward = Callable[[Context, dict[str, Tensor], tuple[Tensor, ...]], Result]
Prologue = Callable[[Context, dict[str, Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a pipeline stage, or of a whole step: all ranks of the mesh run the same one.

    `step` is the step program, in the order of one step; units stand in order of first use.
    `actions` is the schedule. `groups` are the axis tuples that the passes communicate over.
    `caches` are memory that passes write to and later ones read. `prologue` computes values of the
    inputs only, which are summed over microbatches
    and handed to every `forward`. `arriving` comes from other stages and `leaving` goes
    there; one stage `has_loss`. `unread` are entries of the planned batch that no pass reads.
    `zero_gradients` are parameters that the model has a gradient of, which is zero: rewrites left
    out all that reads them.
    With `by_microbatch` each microbatch is computed by itself, as gradient accumulation does: it
    has draws of its own and leaves its new buffers to the next. `adjacent` are parameters whose
    home shards lie one after the other in one memory, since operators read them as one.
    """

    name: str
    mesh: Mesh
    inputs: tuple[TensorSpec, ...]
    parameters: tuple[ParameterSpec, ...]
    forward: Forward
    buffers: tuple[TensorSpec, ...] = ()
    caches: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    arriving: tuple[Crossing, ...] = ()
    leaving: tuple[Crossing, ...] = ()
    has_loss: bool = True
    step: tuple[StepNode, ...] = ()
    num_microbatches: int = 1
    by_microbatch: bool = False
    actions: tuple[str, ...] = ("F0", "B0", "REDUCE", "STEP", "GATHER")
    groups: tuple[tuple[str, ...], ...] = ()
    prologue: Prologue | None = None
    reduce_dtype: str | None = None
    adjacent: tuple[tuple[str, ...], ...] = ()
    unread: tuple[str, ...] = ()
    zero_gradients: tuple[str, ...] = ()

    def nodes(self, action: str, when: str = "step") -> tuple[StepNode, ...]:
        """The step program's nodes of one action and time, in order."""
        return tuple(n for n in self.step if (n.action, n.when) == (action, when))

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are computed from a scaled loss, as in float16."""
        return any(node.kind == "unscale" for node in self.nodes("STEP"))

    def reductions(self) -> dict[str, tuple[StepNode, ...]]:
        """The nodes that each gradient passes until it is whole, by parameter name."""
        found: dict[str, tuple[StepNode, ...]] = {spec.name: () for spec in self.parameters}
        for node in self.step:
            if node.action == "REDUCE" and self.mesh.size(node.axes) > 1:
                for name in node.parameters:
                    found[name] = (*found[name], node)
        return found


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The programs of all stages, the ranks that run them, and the action list of every rank.

    `ranks[s]` are those of stage s, in the order of its mesh. Actions are `F0`, `B0`, `W0` of the
    only stage and `2F0` of stage 2: forward pass, backward pass, and where gradients of weights are
    made apart from it, these. `shared` are the stages that have a parameter, where several do; the
    first one owns it. `replicas` has the number of the replica of the model that each stage is in;
    none where there is one.
    """

    programs: tuple[Program, ...]
    ranks: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[str, ...], ...]
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    loss_dtype: str = "float32"
    replicas: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def mesh(self) -> Mesh:
        """The mesh of all ranks: that of the only stage, or one axis."""
        if len(self.programs) == 1:
            return self.programs[0].mesh
        return Mesh((Axis("all", self.num_ranks, ((self.num_ranks, 1),)),))

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The entries of the batch that some stage reads, each as the first of them does."""
        found = {spec.name: spec for p in reversed(self.programs) for spec in p.inputs}
        return tuple(found.values())

    def replica(self, stage: int) -> int:
        """The number of a stage's replica."""
        return self.replicas[stage] if self.replicas else 0

    def owner(self, parameter: str, stage: int) -> int:
        """The stage that updates a parameter which `stage` has."""
        return self.shared.get(parameter, (stage,))[0]

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank has."""
        return tuple(s for s, ranks in enumerate(self.ranks) if rank in ranks)

    def named(self, rank: int) -> str:
        """`rank 2 (stage 1)`; without stages where there is one only."""
        return rank_name(rank, self.stages_on(rank) if len(self.programs) > 1 else ())


def rank_name(rank: int, stages: Sequence[int]) -> str:
    """`rank 2 (stage 1)`, `rank 2 (stages 1, 3)`."""
    several = "s" if len(stages) > 1 else ""
    return f"rank {rank}" + (f" (stage{several} {', '.join(map(str, stages))})" if stages else "")


def one_stage(program: Program) -> Pipeline:
    """The pipeline of a program that has the whole step."""
    ranks = tuple(range(program.mesh.num_ranks))
    return Pipeline((program,), (ranks,), (program.actions,) * len(ranks))


@dataclass(frozen=True, slots=True)
class Action:
    """An entry of an action list; REDUCE, STEP and GATHER have no stage and no microbatch."""

    kind: str
    stage: int = 0
    microbatch: int = 0

    def __str__(self) -> str:
        if self.kind in ONCE:
            return self.kind
        return f"{self.stage or ''}{self.kind}{self.microbatch}"


def parsed(actions: tuple[str, ...]) -> tuple[Action, ...]:
    """The entries of an action list. Raises `VerifyError` for one that is unknown."""
    return tuple(map(_parsed, actions))


def _parsed(text: str) -> Action:
    found = read_action(text)
    if found is None:
        raise VerifyError(f"unknown action {text!r}")
    kind, stage, microbatch = found
    return Action(kind, stage, microbatch or 0)
