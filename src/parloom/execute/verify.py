"""The proof: the plan's program on forked ranks against the captured program on one device.

Both start from the same weights in float64 (casts inside the model included, `graph.widened`) and
the same global batch, take three steps with the plan's optimizer, and must agree in every loss,
every gradient of the first step, and every weight and buffer at the end (DESIGN section 3). Where
batch semantics are by microbatch, one device accumulates over the same microbatches. Random
masks are drawn for the global tensors. The reference never touches generated code.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from parloom.errors import InputError
from parloom.execute.eager_compare import DIFFERS, EagerReport
from parloom.execute.optimizers import make
from parloom.execute.program import training_program
from parloom.execute.quantized import Addends, QuantizedReference, Told, quantized_gradients
from parloom.execute.ranks import fork_ranks
from parloom.execute.reference import run_step
from parloom.execute.relative import Difference, judged, relative_difference
from parloom.ir.graph import Graph, widened
from parloom.ir.plan import Optimizer, Plan
from parloom.ir.text import parse_graph
from parloom.ir.verify import verify_decisions
from parloom.rewrite.rewrites import rewritten
from parloom.runtime import (
    Box,
    DistributedComm,
    Pipeline,
    Shard,
    Trainer,
    global_draw,
    global_mask,
)

STEPS = 3
LEARNING_RATE = 1e-3
# An adaptive optimizer divides by |gradient| + eps: with torch's 1e-8 a gradient that is zero but
# for rounding (1e-16 of its neighbors) still moves its weight by 1e-8 of a full step, and by
# another amount in every order of summation.
EPS = 1e-4
TOLERANCE = 1e-9
GRADIENT_FLOOR = 1e-2  # of the model's largest gradient
SEED = 0

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The outcome: the worst relative error and the tensor it occurred in.

    `eager` says whether the reference is what the user's own module does, `rounded` what both sides
    round at the same places, which the user's own module does not.
    """

    passed: bool
    worst_error: float
    worst_tensor: str
    first_difference: str | None
    tolerance: float
    num_tensors: int
    num_ranks: int
    steps: int
    shrunk: str = ""
    eager: EagerReport | None = None
    of: str = "steps"
    rounded: str = ""

    def with_eager(self, eager: EagerReport) -> "VerifyReport":
        """The report of both comparisons; the plan is wrong where its reference is."""
        if eager.outcome != DIFFERS:
            return replace(self, eager=eager)
        return replace(self, passed=False, first_difference=eager.difference, eager=eager)

    def __str__(self) -> str:
        return "\n".join(filter(None, (self._line(), str(self.eager or ""))))

    def _line(self) -> str:
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        what = f"{self.num_tensors} tensors on {ranks} over {self.steps} {self.of}"
        shrunk = f" (shrunk: {self.shrunk})" if self.shrunk else ""
        if self.passed:
            both = f" with {self.rounded}" if self.rounded else ""
            return (
                f"PASS: parallel equals single device{both}, {what}{shrunk}: largest relative"
                f" difference {self.worst_error:.1e} ({self.worst_tensor}), limit"
                f" {self.tolerance:.0e}"
            )
        return (
            f"FAIL: first tensor that differs: {self.first_difference}; largest relative difference"
            f" {self.worst_error:.1e} ({self.worst_tensor}), limit {self.tolerance:.0e}; {what}"
            f"{shrunk}"
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run leaves: losses, gradients of the first step, weights and buffers at the end; of
    gradients that are quantized, sums of addends that are not, by what they are.
    """

    losses: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    replicas: tuple[str, ...] = ()  # where ranks that hold the same differ
    addends: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Masks:
    """Random masks and draws of whole tensors, as the runtime's exact mode makes them.

    One of `count` microbatches that are computed by themselves has its part, in the first dim, of
    what all of them draw together.
    """

    step: int = 0
    microbatch: int = 0
    count: int = 1

    def mask(self, key: str, shape: tuple[int, ...], p: float) -> Tensor:
        return self._own(global_mask(SEED, self.step, key, self._all(shape), p), shape)

    def draw(self, key: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Tensor:
        return self._own(global_draw(SEED, self.step, key, self._all(shape), kind, dtype), shape)

    def _all(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        first, *rest = tuple(shape) or (1,)
        return tuple(shape) if self.count == 1 else (self.count * first, *rest)

    def _own(self, drawn: Tensor, shape: tuple[int, ...]) -> Tensor:
        return drawn.chunk(self.count)[self.microbatch].reshape(tuple(shape))


def verify(
    plan: Plan,
    tensors: Tensors,
    batch: Tensors,
    *,
    timeout_s: float = 600.0,
    say: Callable[[str], None] = lambda text: None,
) -> VerifyReport:
    """Run both sides and compare.

    `tensors` are the model's full parameters and buffers by the user's names, `batch` the global
    batch. Raises `LaunchError` where a rank fails, `InputError` where the model's own numbers are
    not finite.
    """
    given = rewritten(parse_graph(plan.graph), plan.decisions.rewrites)
    verify_decisions(given, plan.decisions)  # before what is decided of dtypes is left out
    graph = widened(parse_graph(plan.graph))
    plain = replace(plan.decisions, master_dtype=None, reduce_dtype=None)  # all is float64 here
    plan = replace(plan, decisions=plain)
    tensors = {name: in_double(t) for name, t in tensors.items()}
    batch = {name: in_double(t) for name, t in batch.items()}
    pipeline = training_program(plan, wide=True).pipeline
    say(f"training {STEPS} steps on {pipeline.num_ranks} ranks")
    found = fork_ranks(
        pipeline.num_ranks,
        train_telling,
        pipeline,
        plan.optimizer,
        tensors,
        batch,
        timeout_s=timeout_s,
        say=say,
    )
    parallel = assemble([trace for trace, _ in found])
    quantizer = None
    if plain.sent_dtypes:
        quantizer = QuantizedReference(pipeline.programs[0], [addends for _, addends in found])
    reference = reference_trace(graph, plan.optimizer, tensors, batch, say, quantizer)
    require_finite(reference)
    if quantizer is not None:
        reference = replace(reference, addends=quantizer.exact)
        parallel = replace(parallel, addends=quantizer.summed)
    sent = " and ".join(plain.sent_dtypes)
    rounded = f"what the plan sends in {sent} rounded at the same places" if sent else ""
    return replace(compare(reference, parallel, pipeline.num_ranks), rounded=rounded)


def in_double(tensor: Tensor) -> Tensor:
    """A copy, of numbers with a fraction in double precision."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def reference_trace(
    graph: Graph,
    planned: Optimizer,
    tensors: Tensors,
    batch: Tensors,
    say: Callable[[str], None] = lambda text: None,
    quantizer: QuantizedReference | None = None,
) -> Trace:
    """Three steps of the captured program on this device."""
    trainable = {i.target for i in graph.of_kind("parameter") if i.trainable}
    state = {name: t.clone().requires_grad_(name in trainable) for name, t in tensors.items()}
    optimizer = make(planned, _leaves(state, trainable), lr=LEARNING_RATE, eps=EPS)
    losses: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        say(f"training step {step + 1} of {STEPS} on one device, to compare with")
        found = gradients if step == 0 else None
        losses.append(reference_step(graph, state, batch, optimizer, step, found, quantizer))
    return Trace(tuple(losses), gradients, {n: t.detach() for n, t in state.items()})


def require_finite(reference: Trace) -> None:
    """Raise `InputError` where the model by itself makes NaN or infinity: nothing to compare."""
    first, *later = ((f"loss of step {i + 1}", x) for i, x in enumerate(reference.losses))
    gradients = ((f"gradient of {name}", g) for name, g in sorted(reference.gradients.items()))
    for name, tensor in (first, *gradients, *later):
        if not bool(tensor.isfinite().all()):
            what = "NaN" if bool(tensor.isnan().any()) else "infinite"
            raise InputError(
                f"nothing can be proved: the model's own {name} is {what} on one device, with these"
                " weights and this batch; look at both for NaN and for values that overflow"
            )


def reference_step(
    graph: Graph,
    state: dict[str, Tensor],
    batch: Tensors,
    optimizer: torch.optim.Optimizer,
    step: int,
    gradients: dict[str, Tensor] | None = None,
    quantizer: QuantizedReference | None = None,
) -> Tensor:
    """Step number `step` of the captured program: updates `state`, fills `gradients`; the loss."""
    optimizer.zero_grad()
    read = state if quantizer is None else quantizer.read(state)
    results = run_step(graph, read, batch, lambda index, count: Masks(step, index, count))
    if quantizer is not None:
        quantizer.reduce(step, state, read)
    loss = results["loss"]
    assert loss is not None
    if gradients is not None:
        found = ((name, tensor.grad) for name, tensor in sorted(state.items()))
        gradients.update((name, g.clone()) for name, g in found if g is not None)
    optimizer.step()
    state.update(results["updates"])
    return loss


def _leaves(state: Tensors, trainable: set[str]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(n, t) for n, t in state.items() if n in trainable]  # type: ignore[misc]


Pieces = dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]]]
RankTrace = tuple[list[Tensor], Pieces, Pieces]


def train_telling(
    pipeline: Pipeline, planned: Optimizer, tensors: Tensors, batch: Tensors
) -> tuple[RankTrace, Addends]:
    """The trace of a rank, and what it quantized of gradients."""
    told = Told(frozenset().union(*map(quantized_gradients, pipeline.programs)))
    return train_rank(pipeline, planned, tensors, batch, told), told.addends


def train_rank(
    pipeline: Pipeline,
    planned: Optimizer,
    tensors: Tensors,
    batch: Tensors,
    begin: Callable[[Trainer], None] = lambda trainer: None,
) -> RankTrace:
    """One rank's losses, and its primary pieces of gradients and of the final state; `begin` is
    called before each step.
    """
    torch.set_num_threads(1)
    trainer = Trainer(
        pipeline,
        tensors,
        optimizer=lambda named: make(planned, named, lr=LEARNING_RATE, eps=EPS),
        comm=DistributedComm(pipeline.mesh),
        seed=SEED,
        exact_random=True,
    )
    losses: list[Tensor] = []
    gradients: Pieces = {}
    for step in range(STEPS):
        begin(trainer)
        losses.append(trainer.step(batch).loss)
        if step == 0:
            gradients = pieces_of(gradients_of(trainer))
    state = pieces_of(s for s in trainer.shards() if not s.name.startswith("optimizer/"))
    return losses, gradients, state


def gradients_of(trainer: Trainer) -> Iterator[Shard]:
    """This rank's part of every gradient that there is."""
    for shard in trainer.shards():
        found = trainer.owned.get(shard.name)
        grad = None if found is None else found[0].owned.grad
        if grad is not None:
            yield Shard(shard.name, shard.global_shape, shard.boxes, grad, shard.primary)


def pieces_of(shards: Iterator[Shard]) -> Pieces:
    """Shape, and offsets with values of every box, by name."""
    return {
        shard.name: (
            shard.global_shape,
            [(box.offsets, _cut(shard.tensor, box)) for box in shard.boxes],
        )
        for shard in shards
    }


def _cut(tensor: Tensor, box: Box) -> Tensor:
    return tensor[box.local].clone()


def assemble(parts: list[RankTrace]) -> Trace:
    """The whole tensors of a run from what its ranks sent home."""
    losses = tuple(parts[0][0])
    apart = [
        f"loss of step {i + 1}"
        for p in parts
        for i, x in enumerate(p[0])
        if not _close(x, losses[i])
    ]
    gradients, other = _joined([p[1] for p in parts])
    state, more = _joined([p[2] for p in parts])
    apart += [f"gradient of {n}" for n in other] + [f"{n} after {STEPS} steps" for n in more]
    return Trace(losses, gradients, state, tuple(dict.fromkeys(apart)))


def _joined(parts: list[Pieces]) -> tuple[dict[str, Tensor], list[str]]:
    """Full tensors from the pieces of all ranks, and the names of which replicas differ.

    Elements that no rank gave are NaN.
    """
    result: dict[str, Tensor] = {}
    apart: list[str] = []
    given: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for part in parts:
        for name, (shape, pieces) in part.items():
            for offsets, piece in pieces:
                if name not in result:
                    empty = float("nan") if piece.is_floating_point() else -1
                    result[name] = piece.new_full(shape, empty)
                index = tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))
                result[name][index] = piece
                first = given.setdefault((name, offsets), piece)
                if not torch.equal(first, piece) and not _close(first, piece):
                    apart.append(name)
    return result, apart


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to the rounding of sums in another order."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def compare(
    reference: Trace, parallel: Trace, num_ranks: int, tolerance: float = TOLERANCE
) -> VerifyReport:
    """Relative errors of all tensors, in the order losses, gradients, weights and buffers."""
    largest = max(
        (float(g.abs().max()) for g in reference.gradients.values() if g.numel()), default=0.0
    )
    losses = [
        Difference(f"loss of step {step}", relative_difference(expected, got, 1e-2))
        for step, (expected, got) in enumerate(
            zip(reference.losses, parallel.losses, strict=True), 1
        )
    ]
    gradients = [
        Difference(
            f"gradient of {name}",
            relative_difference(
                reference.gradients.get(name),
                parallel.gradients.get(name),
                GRADIENT_FLOOR * largest,
            ),
        )
        for name in sorted(reference.gradients.keys() | parallel.gradients.keys())
    ]
    state = [
        Difference(
            f"{'weight' if name in reference.gradients else 'state'} {name} after {STEPS} steps",
            relative_difference(
                reference.state.get(name), parallel.state.get(name), LEARNING_RATE * STEPS
            ),
        )
        for name in sorted(reference.state.keys() | parallel.state.keys())
    ]
    floor = GRADIENT_FLOOR * largest
    addends = [
        Difference(name, relative_difference(expected, parallel.addends.get(name), floor))
        for name, expected in reference.addends.items()
    ]
    found = judged([*losses[:1], *addends, *gradients, *losses[1:], *state], tolerance)
    first = None if found.first is None else str(found.first)
    if parallel.replicas and first is None:
        first = f"{parallel.replicas[0]} differs between ranks that hold the same part"
    return VerifyReport(
        first is None,
        found.worst,
        found.worst_tensor,
        first,
        tolerance,
        found.num_tensors,
        num_ranks,
        STEPS,
    )
