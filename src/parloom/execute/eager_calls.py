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
    select_loss,
)
from parloom.capture.microbatch import WHOLE, Split
from parloom.errors import ParloomError
from parloom.execute.replay import Draw, Recorder
from parloom.runtime.memory import separate

CALLS = 3
STEP = 1e-2  # of a parameter's largest element, between two calls

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


class NotComparedError(Exception):
    """The module cannot be run here as it was captured; the message says why."""


def training_calls(
    build: Build, *, other: bool, again: bool, split: Split = WHOLE
) -> Iterator[Call]:
    """Calls of a module in training mode with what each leaves, then one in evaluation mode.

    With `split` a call in training accumulates gradients over the microbatches: the module is
    called on each, and the mean of its losses is the loss.

    With `other`, batches after the first hold other samples, from calls of the factory where it is
    called `again`, or the first one's in another order. Raises `NotComparedError` where the module
    raises.
    """
    loaded = build()
    batches: list[Mapping[str, Tensor]] = [loaded.batch] * CALLS
    if other:
        batches[1:] = other_batches(build if again else lambda: loaded, loaded)
    taken = arguments_of(loaded.model, loaded.batch, loaded.loss)
    with mode(loaded.model, True):
        for batch in batches:
            yield _call(loaded, batch, taken, split, training=True)
            _move(loaded.model)
    with mode(loaded.model, False):
        yield _call(loaded, loaded.batch, taken, WHOLE, training=False)


def other_batches(build: Build, loaded: Loaded) -> Iterator[Mapping[str, Tensor]]:
    """Two more batches: no values that the factory would not give."""
    for shift in range(1, CALLS):
        batch = build().batch
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
    loaded: Loaded, batch: Mapping[str, Tensor], taken: Any, split: Split, *, training: bool
) -> Call:
    model, recorder = loaded.model, Recorder()
    batch = {name: tensor.detach().clone() for name, tensor in batch.items()}
    before = _state(model)
    for parameter in model.parameters():
        parameter.grad = None
    losses: list[Tensor] = []
    outputs: dict[str, Tensor] = {}
    try:
        with warnings.catch_warnings(), torch.enable_grad() if training else torch.no_grad():
            warnings.simplefilter("ignore")
            for part in split.of(batch):
                given = {name: tensor.clone() for name, tensor in part.items()}
                with recorder:
                    output = model(**{n: t for n, t in given.items() if n in taken})
                    flat = list(named_tensors(output))
                    loss = select_loss(output, flat, given, loaded.loss, required=training)
                    if loss is not None:
                        losses.append(loss / split.count)
                    if training and losses:
                        with recorder.paused():
                            losses[-1].backward()  # type: ignore[no-untyped-call]
                            separate(model.parameters())
                outputs = {n: t.detach().clone() for n, t in flat if t is not loss}
    except ParloomError:
        raise
    except Exception as error:  # whatever user code raises
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise NotComparedError(f"the module raised {type(error).__name__}: {reason}") from error
    gradients = {n: _gradient(t) for n, t in model.named_parameters()}
    made = torch.stack([loss.detach() for loss in losses]).sum(0) if losses else torch.zeros(())
    return Call(before, batch, made, gradients, _state(model), tuple(recorder.draws),
                outputs, training)  # fmt: skip


def _state(model: nn.Module) -> State:
    """Copies of parameters and buffers, each under the first of its names."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {n: t.detach().clone() for n, t in named}


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
