"""Whether a model is the one that was planned: it is captured again, and programs are compared.

Rank 0 captures the script's model and tells the others what it found, so that all of them end
alike. Each rank also compares everything that its model's code can reach with rank 0's; where a
rank's differs (a rank, a time stamp, an address), it captures its model too.
"""

import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import deterministic as _deterministic

from parloom.capture import (
    Loss,
    capture_flat,
    cast_needed,
    differences,
    first_difference,
    has_loss_function,
    set_for_training,
)
from parloom.capture.autograd import refuse_hooks
from parloom.capture.microbatch import split_of
from parloom.capture.program import VALUELESS
from parloom.capture.ranges import drawn_batch
from parloom.capture.state.reach import Place, described_parts, key_of, path_of
from parloom.errors import CaptureError, FingerprintError
from parloom.execute.handed_over import FLAT
from parloom.ir.graph import Graph
from parloom.ir.microbatches import of_microbatch, with_whole_batch
from parloom.ir.plan import Plan
from parloom.ir.text import parse_graph
from parloom.runtime import Comm, agreed, told_by_all, told_by_the_first

SHOWN = 100  # characters of a value in a message


def check_tensors(
    model: nn.Module, plan: Plan, graph: Graph, batch: Mapping[str, Tensor] | None = None
) -> None:
    """Raise `FingerprintError` where parameters, buffers or `batch` are not as planned."""
    whole = with_whole_batch(graph, plan.decisions.num_microbatches)
    what = differences(model, whole, batch or {})
    if what:
        advice = cast_needed(model, graph) or _advice(plan)
        raise FingerprintError(f"the plan was made for another model: {what}; {advice}")


def check_program(
    model: nn.Module, batch: Mapping[str, Tensor], loss: Loss | None, plan: Plan, graph: Graph
) -> None:
    """Raise `FingerprintError` unless the model captures to the plan's programs.

    The message names the first operator, argument or constant that differs.
    """
    programs = [(graph, True)]
    split = split_of(graph, batch)
    if plan.evaluation_graph:
        programs.append((parse_graph(plan.evaluation_graph), False))
    for planned, training in programs:
        where = "" if training else " (in evaluation)"
        try:
            given = split.first(batch) if training else batch
            found, _ = capture_flat(model, given, loss=loss, training=training)
            if training and split.count > 1:
                found = of_microbatch(found, dict(split.dims), split.count)
        except CaptureError as error:
            raise FingerprintError(
                f"the plan was made for another model{where}: {error}"
                f"{_without_loss(graph, loss)}; {_advice(plan)}"
            ) from error
        what = first_difference(planned, found)
        if what:
            raise FingerprintError(
                f"the plan was made for another model{where}: {what}"
                f"{_without_loss(graph, loss)}; {_advice(plan)}"
            )


def check_again(model: nn.Module, loss: Loss | None, plan: Plan) -> None:
    """`check_program` of a model whose weights may have no values; generators stay as they are.

    Raises `FingerprintError` also where the model cannot be captured.
    """
    graph = parse_graph(plan.graph)
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    whole = with_whole_batch(graph, plan.decisions.num_microbatches)
    batch = drawn_batch(whole, plan.ranges, device)
    try:
        settings = set_for_training(model) if plan.source.is_config else nullcontext()
        with same_draws(), on_the_host(model), settings:
            check_program(model, batch, loss, plan, graph)
    except CaptureError as error:
        raise FingerprintError(f"the plan was made for another model: {error}") from error


def check_on_ranks(
    model: nn.Module, loss: Loss | None, plan: Plan, comm: Comm, device: torch.device
) -> None:
    """`check_again` on rank 0, and on ranks whose model is not rank 0's in all that its code can
    reach; timed, and told on stderr. Every rank raises where one does.
    """
    with agreed(comm, device):
        # First: a trace may fill caches of the model.
        parts = tuple(described_parts(model, loss))
        if comm.rank == 0:
            start = time.perf_counter()
            check_again(model, loss, plan)
            took = time.perf_counter() - start
            line = f"captured the script's model again in {took:.1f} s: it is the planned one"
            print(line, file=sys.stderr, flush=True)
    keys = told_by_all(comm, key_of(parts), device)
    others = [rank for rank, key in enumerate(keys) if key != keys[0]]
    if others:
        _check_others(model, loss, plan, comm, device, parts, others)


def _check_others(
    model: nn.Module,
    loss: Loss | None,
    plan: Plan,
    comm: Comm,
    device: torch.device,
    parts: tuple[tuple[Place, str], ...],
    others: list[int],
) -> None:
    """`check_again` on ranks whose model differs from rank 0's; the first of them says how."""
    texts = told_by_the_first(comm, "\0".join(text for _, text in parts), device).split("\0")
    found = ""
    if comm.rank in others:
        what = _first_unlike(texts, parts, comm.rank)
        start = time.perf_counter()
        try:
            check_again(model, loss, plan)
        except Exception as error:  # whatever it is: the other ranks wait for an answer
            found = f"rank {comm.rank} built another model than rank 0: {what}: {error}"
        if not found and comm.rank == others[0]:
            more = f", and on {len(others) - 1} more ranks" if others[1:] else ""
            line = f"{what}; captured the model there too{more}, in"
            line += f" {time.perf_counter() - start:.1f} s: it is the planned one all the same"
            print(line, file=sys.stderr, flush=True)
    for text in filter(None, told_by_all(comm, found, device)):
        raise FingerprintError(
            f"{text}; build the model alike on every rank, without asking for rank, host, process"
            " or environment"
        )


def _first_unlike(texts: list[str], parts: tuple[tuple[Place, str], ...], rank: int) -> str:
    """The first part that is not as rank 0's, whose `texts` are in the same order."""
    for there, (place, here) in zip(texts, parts, strict=False):
        if there != here:
            one, other = (_value(text) for text in (there, here))
            return f"{path_of(place)} is {other} on rank {rank} and {one} on rank 0"
    return "one of the two reaches more"


def _value(text: str) -> str:
    """A part's value, without its name."""
    value = text.partition("=")[2] or text
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}..."


@contextmanager
def on_the_host(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers of the meta device are on the CPU for a while, beside the others.

    Nothing reads them or writes to them, so that they take addresses and no memory.
    """
    places = [(d, n, t) for d, n, t in _places(model) if isinstance(t, Tensor) and t.is_meta]
    if places:
        refuse_hooks(model)  # those of parameters, which their stand-ins have not
    deterministic: Any = _deterministic
    filled = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    made: dict[int, Tensor] = {}
    try:
        for tensors, name, meta in places:
            if id(meta) not in made:
                empty: Tensor = torch.empty_like(meta, device="cpu", requires_grad=False)
                trained = meta.requires_grad
                parameter = isinstance(meta, nn.Parameter)
                made[id(meta)] = nn.Parameter(empty, trained) if parameter else empty
                setattr(made[id(meta)], VALUELESS, True)
            tensors[name] = made[id(meta)]
        yield
    finally:
        deterministic.fill_uninitialized_memory = filled
        for tensors, name, meta in places:
            tensors[name] = meta


@contextmanager
def same_draws() -> Iterator[None]:
    """Generators of the host end as they began: only rank 0 runs what is inside."""
    numpy: Any = sys.modules.get("numpy")
    state, legacy = random.getstate(), numpy.random.get_state() if numpy else None
    cuda: Any = torch.cuda
    devices = [cuda.current_device()] if cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy:
                numpy.random.set_state(legacy)


def _places(model: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    """(container, name, tensor) of all parameters and buffers."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            yield from ((tensors, name, tensor) for name, tensor in tensors.items())
        flat = vars(module).get(FLAT, [])
        yield from ((flat, index, tensor) for index, tensor in enumerate(flat))


def _advice(plan: Plan) -> str:
    return f"build the model that was planned, or plan again: {plan.command()}"


def _without_loss(graph: Graph, loss: Loss | None) -> str:
    if loss is not None or not has_loss_function(graph):
        return ""
    return " (a factory's loss function is given as parallelize(..., loss=...))"
