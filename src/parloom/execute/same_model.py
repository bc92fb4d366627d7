"""Whether a model is the one that was planned: it is captured again, and programs are compared.

Rank 0 captures the script's model and tells the others what it found, so that all of them end
alike. Each rank also compares a key over everything that its model's code can reach with rank 0's:
a rank that built another model would run the plan's program with it.
"""

import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import deterministic as _deterministic

from parloom.capture import Loss, capture_flat, differences, first_difference
from parloom.capture.autograd import refuse_hooks
from parloom.capture.reach import key
from parloom.errors import CaptureError, FingerprintError, InputError, LaunchError
from parloom.ir.graph import Graph
from parloom.ir.plan import Plan
from parloom.ir.text import parse_graph
from parloom.runtime import Comm, differ_from_the_first, told_by_the_first


def check_tensors(
    model: nn.Module, plan: Plan, graph: Graph, batch: Mapping[str, Tensor] | None = None
) -> None:
    """Raise `FingerprintError` where parameters, buffers or `batch` are not as planned."""
    what = differences(model, graph, batch or {})
    if what:
        raise FingerprintError(f"the plan was made for another model: {what}; {_advice(plan)}")


def check_program(
    model: nn.Module, batch: Mapping[str, Tensor], loss: Loss | None, plan: Plan, graph: Graph
) -> None:
    """Raise `FingerprintError` unless the model captures to the plan's programs.

    The message names the first operator, argument or constant that differs.
    """
    programs = [(graph, True)]
    if plan.evaluation_graph:
        programs.append((parse_graph(plan.evaluation_graph), False))
    for planned, training in programs:
        where = "" if training else " (in evaluation)"
        try:
            found, _ = capture_flat(model, batch, loss=loss, training=training)
        except CaptureError as error:
            raise FingerprintError(
                f"the plan was made for another model{where}: {error}"
                f"{_without_loss(plan, loss)}; {_advice(plan)}"
            ) from error
        what = first_difference(planned, found)
        if what:
            raise FingerprintError(
                f"the plan was made for another model{where}: {what}"
                f"{_without_loss(plan, loss)}; {_advice(plan)}"
            )


def check_on_ranks(
    model: nn.Module,
    loss: Loss | None,
    plan: Plan,
    graph: Graph,
    comm: Comm,
    device: torch.device,
) -> None:
    """`check_program` on rank 0, timed and told on stderr; every rank raises what it raised.

    Where a rank's model differs from rank 0's in what its code can reach, that is named too.
    """
    # First: a trace may fill caches of the model.
    mine = key(model, loss)
    error: Exception | None = None
    if comm.rank == 0:
        start = time.perf_counter()
        try:
            with same_draws(), on_the_host(model):
                check_program(model, _batch(model, graph), loss, plan, graph)
        except CaptureError as raised:
            error = FingerprintError(f"the plan was made for another model: {raised}")
        except Exception as raised:  # whatever it is: the other ranks wait for an answer
            error = raised
        else:
            took = time.perf_counter() - start
            line = f"captured the script's model again in {took:.1f} s: it is the planned one"
            print(line, file=sys.stderr, flush=True)
    text = "" if error is None else f"{type(error).__name__}\n{error}"
    kind, _, text = told_by_the_first(comm, text, device).partition("\n")
    if error is not None:
        raise error
    if kind:
        kinds = {"FingerprintError": FingerprintError, "InputError": InputError}
        raise kinds.get(kind, LaunchError)(text if kind in kinds else f"on rank 0: {kind}: {text}")
    others = differ_from_the_first(comm, mine, device)
    if others:
        raise FingerprintError(
            f"rank {others[0]} built another model than rank 0: an attribute, a closure, a global"
            " or a function that its code reaches differs; build the model alike on every rank,"
            " without asking for rank, host, process or environment"
        )


@contextmanager
def on_the_host(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers of the meta device are on the CPU for a while, beside the others.

    Nothing reads them or writes to them, so that they take addresses and no memory.
    """
    everything = [d for m in model.modules() for d in (m._parameters, m._buffers)]
    places = [(d, n, t) for d in everything for n, t in d.items() if t is not None and t.is_meta]
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
            tensors[name] = made[id(meta)]  # type: ignore[assignment]
        yield
    finally:
        deterministic.fill_uninitialized_memory = filled
        for tensors, name, meta in places:
            tensors[name] = meta  # type: ignore[assignment]


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


def _batch(model: nn.Module, graph: Graph) -> dict[str, Tensor]:
    """Zeros in the planned shapes: no value of a batch is looked at."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    specs = {i.target: i.value.spec for i in graph.of_kind("batch")}
    return {
        name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        for name, spec in specs.items()
    }


def _advice(plan: Plan) -> str:
    return f"build the model that was planned, or plan again: {plan.command()}"


def _without_loss(plan: Plan, loss: Loss | None) -> str:
    if loss is not None or not plan.source.is_factory:
        return ""
    return " (a factory's loss function is given as parallelize(..., loss=...))"
