"""Training calls of the user's own module, and the captured program on the same numbers.

Every call starts on both sides from the state that the module has then, so an error of one call is
not carried into the next. Between calls the parameters move as under an optimizer.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parloom.capture import (
    Loaded,
    arguments_of,
    mode,
    named_tensors,
    parameters_of,
    select_loss,
)
from parloom.errors import ParloomError
from parloom.execute.draws import Draw, Recorder, Replay, ReplayError
from parloom.execute.reference import evaluate
from parloom.execute.relative import relative_difference
from parloom.ir.graph import Graph

CALLS = 3
# Of a tensor's own scale. Half precision is compared with itself, operator by operator.
TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
OTHER_TOLERANCE = 0.1  # eight-bit floats
GRADIENT_FLOOR = 1e-2  # of the call's largest gradient, as in `execute.verify`
STEP = 1e-2  # of a parameter's largest element, between two calls
AGAIN = 10_000_000  # parameters of a model that is built again only for another batch

Build = Callable[[], Loaded]
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """What one call of the module began with, gave, and left."""

    before: State
    batch: Mapping[str, Tensor]
    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    after: State
    draws: tuple[Draw, ...]
    outputs: Mapping[str, Tensor]
    training: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """The first tensor that differs; `error` is relative."""

    tensor: str
    error: float
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.tensor} ({self.detail or f'relative difference {self.error:.1e}'})"


class NotComparedError(Exception):
    """The module cannot be run here as it was captured; the message says why."""


def training_calls(build: Build, graph: Graph, *, permuted: bool) -> Iterator[Call]:
    """Calls of a module in training mode with what each leaves, then one in evaluation mode.

    Batches after the first are the factory's next ones or, with `permuted`, the first one's samples
    in another order; otherwise the first one again. Raises `NotComparedError` where the module
    raises.
    """
    loaded = build()
    batches = [loaded.batch, *other_batches(build, loaded)] if permuted else [loaded.batch] * CALLS
    taken = arguments_of(loaded.model, loaded.batch, loaded.loss)
    with mode(loaded.model, True):
        for batch in batches:
            yield _call(loaded, graph, batch, taken, training=True)
            _move(loaded.model)
    with mode(loaded.model, False):
        yield _call(loaded, graph, loaded.batch, taken, training=False)


def other_batches(build: Build, loaded: Loaded) -> Iterator[Mapping[str, Tensor]]:
    """Two more batches: no values that the factory would not give."""
    small = sum(p.numel() for p in loaded.model.parameters()) <= AGAIN
    for shift in range(1, CALLS):
        batch = build().batch if small else loaded.batch
        alike = batch.keys() == loaded.batch.keys() and all(
            (t.shape, t.dtype) == (loaded.batch[n].shape, loaded.batch[n].dtype)
            for n, t in batch.items()
        )
        same = alike and all(torch.equal(t, loaded.batch[n]) for n, t in batch.items())
        yield batch if alike and not same else _rolled(loaded.batch, shift)


def _rolled(batch: Mapping[str, Tensor], shift: int) -> dict[str, Tensor]:
    """The samples in another order; they lie along the first dim that most inputs share."""
    sizes = [t.shape[0] for t in batch.values() if t.dim()]
    size = max(sizes, key=sizes.count, default=0)
    return {n: t.roll(shift, 0) if t.dim() and t.shape[0] == size else t for n, t in batch.items()}


def _call(
    loaded: Loaded, graph: Graph, batch: Mapping[str, Tensor], taken: Any, *, training: bool
) -> Call:
    model, recorder = loaded.model, Recorder()
    batch = {name: tensor.detach().clone() for name, tensor in batch.items()}
    before = _state(model, graph)
    for parameter in model.parameters():
        parameter.grad = None
    given = {name: tensor.clone() for name, tensor in batch.items()}
    try:
        with warnings.catch_warnings(), torch.enable_grad() if training else torch.no_grad():
            warnings.simplefilter("ignore")
            with recorder:
                output = model(**{n: t for n, t in given.items() if n in taken})
                flat = list(named_tensors(output))
                loss = select_loss(output, flat, given, loaded.loss, required=training)
                if training and loss is not None:
                    with recorder.paused():
                        loss.backward()  # type: ignore[no-untyped-call]
    except ParloomError:
        raise
    except Exception as error:  # whatever user code raises
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise NotComparedError(f"the module raised {type(error).__name__}: {reason}") from error
    live = parameters_of(model, graph)
    gradients = {n: _gradient(t) for n, t in live.items() if isinstance(t, nn.Parameter)}
    outputs = {n: t.detach().clone() for n, t in flat if t is not loss}
    made = torch.zeros(()) if loss is None else loss.detach().clone()
    return Call(before, batch, made, gradients, _state(model, graph), tuple(recorder.draws),
                outputs, training)  # fmt: skip


def _state(model: nn.Module, graph: Graph) -> State:
    return {n: t.detach().clone() for n, t in parameters_of(model, graph).items()}


def _gradient(tensor: Tensor) -> Tensor | None:
    gradient = tensor.grad
    if gradient is None:
        return None
    return (gradient.to_dense() if gradient.is_sparse else gradient).clone()


def _move(model: nn.Module) -> None:
    """Move every parameter against its gradient, by a hundredth of its scale."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is None or not parameter.numel():
                continue
            gradient = _gradient(parameter)
            assert gradient is not None
            largest = float(gradient.abs().max())
            if 0 < largest < float("inf"):
                scale = max(float(parameter.abs().max()), STEP)
                parameter.sub_((gradient * (STEP * scale / largest)).to(parameter.dtype))


@dataclass(frozen=True, slots=True)
class Compared:
    """The largest relative difference of one call, and the first that is above the tolerance."""

    worst: float
    worst_tensor: str
    first: Difference | None
    num_tensors: int


def compare_call(graph: Graph, call: Call, where: str, tolerance: float) -> Compared:
    """The captured program on the numbers of `call`, beside what the module made of them.

    Raises `ReplayError` where its draws are not the module's.
    """
    trainable = {i.target for i in graph.of_kind("parameter") if i.trainable}
    replay = Replay(list(call.draws))
    state = {n: t.clone().requires_grad_(n in trainable) for n, t in call.before.items()}
    values = {
        i.value.name: (call.batch if i.kind == "batch" else state)[i.target]
        for i in graph.inputs
        if i.kind != "constant"
    }
    with torch.enable_grad() if graph.training else torch.no_grad():
        results = evaluate(graph, values, dropout=replay)
        if graph.training and results["loss"] is not None:
            results["loss"].backward()  # type: ignore[no-untyped-call]
    pairs: list[tuple[str, Tensor | None, Tensor | None, float]] = []
    if results["loss"] is not None:
        pairs.append(("loss", call.loss, results["loss"].detach(), 1e-2))
    if graph.training:
        found = [g for g in call.gradients.values() if g is not None and g.numel()]
        floor = GRADIENT_FLOOR * max((float(g.abs().max()) for g in found), default=0.0)
        pairs += [
            (f"gradient of {n}", g, state[n].grad if n in trainable else None, floor)
            for n, g in call.gradients.items()
        ]
    else:
        outputs = results["outputs"]
        pairs += [(f"output {n}", t, outputs.get(n), 1e-2) for n, t in call.outputs.items()]
    updates = results["updates"]
    pairs += [
        (f"{_kind(graph, n)} {n}", t, updates.get(n, call.before[n]).detach(), 1e-6)
        for n, t in call.after.items()
    ]
    return _judged([(f"{name} {where}", *rest) for name, *rest in pairs], tolerance, replay)


def _judged(pairs: list[Any], tolerance: float, replay: Replay) -> Compared:
    worst, worst_tensor, first = 0.0, "", None
    for name, expected, got, floor in pairs:
        if (expected is None) != (got is None):
            had = "the module has none" if expected is None else "the captured program has none"
            difference = Difference(name, float("inf"), had)
        else:
            difference = Difference(name, _error(expected, got, floor))
        if not difference.error <= worst:
            worst, worst_tensor = difference.error, name
        if first is None and not difference.error <= tolerance:
            first = difference
    if first is not None and replay.num_left:
        raise ReplayError(f"{replay.num_left} draws of the module are not in the program")
    return Compared(worst, worst_tensor, first, len(pairs))


def _error(expected: Tensor | None, got: Tensor | None, floor: float) -> float:
    """The relative difference; none between NaN in the same places, or two missing tensors."""
    if expected is None and got is None:
        return 0.0
    if expected is None or got is None or expected.shape != got.shape:
        return relative_difference(expected, got, floor)
    unknown = expected.isnan()
    if unknown.any() and torch.equal(unknown, got.isnan()):
        expected, got = expected.masked_fill(unknown, 0), got.masked_fill(unknown, 0)
    return relative_difference(expected, got, floor)


def _kind(graph: Graph, target: str) -> str:
    return next(i.kind for i in graph.inputs if i.target == target)


def tolerance_of(graph: Graph) -> tuple[str, float]:
    """The least precise floating dtype in a program, and the error that its rounding explains."""
    found = {i.value.spec.dtype for i in graph.inputs if i.value.spec.is_float}
    found |= {v.spec.dtype for f in graph.flat() for v in f.node.results if v.spec.is_float}
    limits = {dtype: TOLERANCES.get(dtype, OTHER_TOLERANCE) for dtype in found}
    dtype = max(sorted(limits), key=limits.__getitem__)
    return dtype, limits[dtype]
