"""The step program: what happens to parameters outside autograd, as nodes.

Gradients leave autograd partial over `PParameter.reduce`. The nodes below reduce them, update the
owned chunks and make the weights whole again (ZeRO: Rajbhandari et al., SC'20). A weight is in
chunks over axes W, its gradient over G, its optimizer state over S, where W begins G and G begins S
(ZeRO-1: none, none, S; within a node and across all of them: W, W, S):

    each pass         all_gather over W
    each microbatch   reduce_scatter over G
    each step         reduce_scatter over S without G, all_reduce over what else is partial,
                      update, all_gather over S without W

Along an axis of G or S over which a gradient is not partial, each rank keeps its chunk. Weights
that are gathered in each pass travel in the data type that a plan gives them, and so do gradients
that one collective makes whole, so that each addend is quantized once; weights that were updated
are gathered as they are. The cost layer prices these nodes, the generated program lists them and
the runtime runs them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from parloom.ir.adjacent import side_by_side
from parloom.ir.graph import DTYPE_BYTES
from parloom.ir.pcg import PCG, TIME, PCall, PParameter, operands_of, results_of
from parloom.ir.plan import Decisions

K = TypeVar("K")

EACH_PASS, EACH_MICROBATCH, EACH_STEP = "forward and backward", "microbatch", "step"

# Collectives on parameters are cut into buckets of torch DDP's size, and of no less than its first
# one; a small model that fits one bucket would leave the network idle until the end.
MAX_BUCKET_BYTES = 25 << 20
MIN_BUCKET_BYTES = 1 << 20
MIN_BUCKETS = 4


@dataclass(frozen=True, slots=True)
class StepNode:
    """`kind` over `axes` for `parameters`, at the times `when` says.

    Kinds: all_gather, reduce_scatter, all_reduce (collectives over `axes`); unscale (divide
    by the loss scale and check for overflow, where the program computes in float16), gradient_norm
    (for clipping, each element counted once) and update (the optimizer on owned chunks), which are
    about all trained parameters and list none. `unit` is the block call (or "" for main) for which
    weights are gathered and after whose backward pass their gradients are reduced; None where
    gradients leave in buckets of `bucket_bytes` as they arrive. A gradient runs through its nodes
    in order. What travels is quantized to `dtype`, where there is one (`parloom.quantization`).
    """

    action: str
    kind: str
    axes: tuple[str, ...]
    parameters: tuple[PParameter, ...] = ()
    when: str = EACH_STEP
    unit: str | None = None
    bucket_bytes: int = 0
    dtype: str = ""

    def __str__(self) -> str:
        over = f" in {self.dtype}" if self.dtype else ""
        over += f" over {'x'.join(self.axes)}" if self.axes else ""
        count = f" of {len(self.parameters)}" if self.parameters else ""
        unit = f" for {self.unit or 'main'}" if self.unit is not None else ""
        return f"{self.action}: {self.kind}{over}{count}{unit}, each {self.when}"


def step_program(pcg: PCG) -> tuple[StepNode, ...]:
    """All nodes in the order in which a step runs them."""
    units = _units(pcg)
    trained = tuple(p for p in pcg.parameters if p.input.trainable)
    space = tuple(a.name for a in pcg.mesh.axes if a.name != TIME)
    # A backward pass in float16 is one of a scaled loss.
    scaled = ("unscale",) if _gradients_in_half(pcg) else ()
    checks = (StepNode("STEP", kind, space) for kind in (*scaled, "gradient_norm"))
    update = StepNode("STEP", "update", ())
    reductions = (_in_buckets(node, pcg) for node in _reductions(trained, units, pcg))
    publications = (_in_buckets(node, pcg) for node in _publications(trained))
    return (*_gathers(units, pcg), *reductions, *checks, update, *publications)


def _gradients_in_half(pcg: PCG) -> bool:
    """Whether a gradient passes a value in float16; batches and tables in float16 have none."""
    return any(
        value.differentiable and value.spec.dtype == "float16"
        for function in (pcg.main, *pcg.functions)
        for value in (*function.inputs, *(v for item in function.body for v in results_of(item)))
    )


def block_weights(pcg: PCG) -> dict[str, tuple[bool, ...]]:
    """Per lowered function, which inputs are parameters that no one but the call at hand reads."""
    parameters = {p.input.value.name for p in pcg.parameters}
    readers: dict[str, set[int]] = {}
    for index, item in enumerate(pcg.main.body):
        for value in operands_of(item):
            readers.setdefault(value.name, set()).add(index)
    private = parameters - {value.name for _, value in (*pcg.outputs, *pcg.updates)}
    found: dict[str, tuple[bool, ...]] = {}
    for call in pcg.main.body:
        if isinstance(call, PCall):
            own = tuple(a.name in private and len(readers[a.name]) == 1 for a in call.args)
            before = found.get(call.function, own)
            found[call.function] = tuple(x and y for x, y in zip(own, before, strict=True))
    return found


def _units(pcg: PCG) -> dict[str, tuple[PParameter, ...]]:
    """Parameters whose weights are stored in chunks, by the unit that they are gathered for.

    Main comes first: what it reads stays gathered for a whole pass.
    """
    chunked = {p.input.value.name: p for p in pcg.parameters if p.decision.weight.axes}
    flags = block_weights(pcg)
    calls: dict[str, tuple[PParameter, ...]] = {}
    for item in pcg.main.body:
        if isinstance(item, PCall):
            own = zip(item.args, flags[item.function], strict=True)
            calls[item.prefix] = tuple(
                chunked.pop(v.name) for v, f in own if f and v.name in chunked
            )
    return {unit: members for unit, members in ({"": tuple(chunked.values())} | calls).items()
            if members}  # fmt: skip


def _gathers(units: dict[str, tuple[PParameter, ...]], pcg: PCG) -> Iterator[StepNode]:
    """Weights stored in chunks are gathered for the unit that reads them, in both passes, into the
    memory of all: those that are adjacent stand beside each other.
    """
    for unit, members in units.items():
        keys = (
            (p.decision.weight.axes, p.input.value.spec.dtype, p.decision.weight_sent)
            for p in members
        )
        for (axes, _, sent), alike in _grouped(zip(keys, members, strict=True)):
            ordered = side_by_side(alike, pcg.adjacent)
            yield StepNode("GATHER", "all_gather", axes, ordered, EACH_PASS, unit, dtype=sent)


def _reductions(
    trained: tuple[PParameter, ...], units: dict[str, tuple[PParameter, ...]], pcg: PCG
) -> Iterator[StepNode]:
    """Gradients are scattered over the axes of their chunks over which they are partial: in every
    microbatch to how they are stored, once a step to how their optimizer state is stored. Over the
    axes that replicate the state, its chunk alone is all-reduced.
    """
    unit_of = {p.input.value.name: unit for unit, members in units.items() for p in members}
    steps = []
    for parameter in trained:
        gradient, state = parameter.decision.gradient.axes, parameter.decision.optimizer.axes
        partial = tuple(a for a in parameter.reduce if a != TIME)
        scattered = tuple(a for a in gradient if a in partial)
        path = [
            ("reduce_scatter", scattered, EACH_MICROBATCH),
            ("reduce_scatter", tuple(a for a in state[len(gradient) :] if a in partial), EACH_STEP),
            ("all_reduce", tuple(a for a in partial if a not in state), EACH_STEP),
        ]
        once = sum(pcg.mesh.size(axes) > 1 for _, axes, _ in path) == 1
        sent = parameter.decision.gradient_sent
        for kind, axes, when in path:
            if axes:
                unit = unit_of.get(parameter.input.value.name)
                dtype = sent if once and pcg.mesh.size(axes) > 1 else ""
                steps.append(((kind, axes, when, unit, dtype), parameter))
    # A gradient passes its nodes in this order.
    order = ("reduce_scatter", EACH_MICROBATCH), ("reduce_scatter", EACH_STEP)
    rank = {key: index for index, key in enumerate((*order, ("all_reduce", EACH_STEP)))}
    steps.sort(key=lambda step: rank[step[0][0], step[0][2]])
    for (kind, axes, when, unit, dtype), members in _grouped(steps):
        yield StepNode("REDUCE", kind, axes, members, when, unit, dtype=dtype)


def as_sent(pcg: PCG) -> Decisions:
    """The decisions of a program without data types in which nothing of it is sent."""
    sent = {
        (node.action, parameter.input.target): node.dtype
        for node in step_program(pcg)
        for parameter in node.parameters
        if node.dtype
    }
    return replace(
        pcg.decisions,
        parameters=tuple(
            replace(
                own,
                weight_sent=sent.get(("GATHER", own.name), ""),
                gradient_sent=sent.get(("REDUCE", own.name), ""),
            )
            for own in pcg.decisions.parameters
        ),
    )


def _publications(trained: tuple[PParameter, ...]) -> Iterator[StepNode]:
    """Weights in larger chunks than those that each rank updated, or whole, are gathered at the
    end.
    """
    apart = []
    for parameter in trained:
        state = parameter.decision.optimizer.axes
        axes = state[len(parameter.decision.weight.axes) :]
        if axes:
            apart.append(((axes, parameter.input.value.spec.dtype), parameter))
    for (axes, _), members in _grouped(apart):
        yield StepNode("GATHER", "all_gather", axes, members)


def _grouped(steps: Iterable[tuple[K, PParameter]]) -> list[tuple[K, tuple[PParameter, ...]]]:
    groups: dict[K, list[PParameter]] = {}
    for key, parameter in steps:
        groups.setdefault(key, []).append(parameter)
    return [(key, tuple(members)) for key, members in groups.items()]


def _in_buckets(node: StepNode, pcg: PCG) -> StepNode:
    """`node` with the size of its buckets, unless it runs for one unit at a time."""
    if node.unit is not None:
        return node
    reduce_dtype = pcg.decisions.reduce_dtype if node.action == "REDUCE" else None
    size = sum(
        p.elements(pcg.mesh) * DTYPE_BYTES[reduce_dtype or p.input.value.spec.dtype]
        for p in node.parameters
    )
    return replace(node, bucket_bytes=bucket_bytes(size))


def bucket_bytes(size: int) -> int:
    """The bytes after which a bucket is full, of `size` bytes in all."""
    return min(MAX_BUCKET_BYTES, max(MIN_BUCKET_BYTES, size // MIN_BUCKETS))
