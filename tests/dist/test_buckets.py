"""Gradient buckets: when they are launched, what shares one, and what a run repeats to the bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parloom import runtime as rt
from parloom.runtime import leaves
from parloom.runtime.threads import ThreadGroup
from parloom.runtime.whole_shapes import Untouched
from tests.dist import mlp, steps

MESH = rt.grid({"x": 2, "y": 2})


def recorded(
    made: rt.Program, monkeypatch: pytest.MonkeyPatch, steps: int = 2
) -> list[list[tuple[str, Any]]]:
    """Per step of rank 0: all-reduces by number of elements, reduce-scatters by that of a chunk,
    gradients by name, in order.
    """
    events: list[list[tuple[str, Any]]] = []
    all_reduce, reduce_scatter = ThreadGroup.all_reduce, ThreadGroup.reduce_scatter

    def recording(group: ThreadGroup, tensor: Tensor, op: str = "sum") -> Any:
        if events and group in mine:
            events[-1].append(("reduce", tensor.numel()))
        return all_reduce(group, tensor, op)

    def scattering(group: ThreadGroup, output: Tensor, tensor: Tensor) -> Any:
        if events and group in mine:
            events[-1].append(("scatter", output.numel()))
        return reduce_scatter(group, output, tensor)

    mine: list[Any] = []
    monkeypatch.setattr(ThreadGroup, "all_reduce", recording)
    monkeypatch.setattr(ThreadGroup, "reduce_scatter", scattering)
    # Hooks are refused to users; these only look on.
    monkeypatch.setattr(Untouched, "check", lambda *_: None)

    def body(comm: rt.Comm) -> None:
        one = rt.Trainer(made, mlp.model().state_dict(), optimizer=mlp.sgd, comm=comm)
        if comm.rank == 0:
            mine.extend(comm.group(node.axes) for node in made.step if node.action == "REDUCE")
            for held in one.parts[0].store.helds.values():
                if held.weight is not None and held.spec.trainable:
                    held.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda _, name=held.name: events[-1].append(("gradient", name))
                    )
        for step in range(steps):
            comm.barrier()
            if comm.rank == 0:
                events.append([])
            one.step(mlp.batch(seed=step))

    rt.run_threads(made.mesh, body)
    return events


def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(steps, "BUCKET_BYTES", 1)


def test_reduction_overlaps_with_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, each bucket leaves as soon as its last gradient is there."""
    small_buckets(monkeypatch)
    made = mlp.program(MESH, mlp.Layout(("x", "y")))
    first, second = recorded(made, monkeypatch)
    order = [name for kind, name in second if kind == "gradient"]
    assert order[-1] == "gain"
    assert "unused" not in order
    assert [name for kind, name in first if kind == "gradient"] == order
    launched = second.index(("reduce", made_numel(made, order[0])))
    assert launched < second.index(("gradient", "gain"))
    # The loss, then one bucket per parameter.
    assert sum(kind == "reduce" for kind, _ in second) == 1 + len(order)


def made_numel(made: rt.Program, name: str) -> int:
    spec = next(spec for spec in made.parameters if spec.name == name)
    return int(torch.Size(spec.shape).numel())


def test_only_the_last_microbatch_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mlp.program(mlp.with_time(MESH, 3), mlp.Layout(("x", "y")))
    total = sum(
        made_numel(made, s.name) for s in made.parameters if s.trainable and s.name != "unused"
    )
    for events in recorded(made, monkeypatch):
        reduced = [size for kind, size in events if kind == "reduce"]
        assert reduced == [1, 1, 1, total]


@pytest.mark.parametrize(
    ("chunks", "scattered", "reduced"),
    [
        (((), (), ("x", "y")), [4], []),  # ZeRO-1: once, of the sum over microbatches
        (((), ("x", "y"), ("x", "y")), [4, 4, 4], []),
        (((), ("x",), ("x", "y")), [2, 2, 2, 4], []),  # within x each time, then within y
        (((), (), ("x",)), [2], [2]),  # only the chunk is all-reduced
        (((), ("x",), ("x",)), [2, 2, 2], [2]),
    ],
)
def test_gradients_are_scattered_to_their_owners(
    chunks: Any, scattered: list[int], reduced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In how many parts the chunks are that each collective leaves."""
    made = mlp.program(mlp.with_time(MESH, 3), mlp.Layout(("x", "y"), chunks=chunks))
    trained = [s for s in made.parameters if s.trainable and s.name != "unused"]

    def total(parts: int) -> int:
        finest = made.mesh.size(chunks[-1])
        rows = [(made_numel(made, s.name), s.shape[s.storage.dim]) for s in trained]
        return sum(n // size * -(-size // finest) * (finest // parts) for n, size in rows)

    for events in recorded(made, monkeypatch):
        assert [n for kind, n in events if kind == "scatter"] == [total(p) for p in scattered]
        sizes = [n for kind, n in events if kind == "reduce" and n > 1]  # without losses
        assert sizes == [total(p) for p in reduced]


def test_other_reduce_axes_go_into_another_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is whole over an axis must not be summed over it."""
    made = mlp.program(MESH, mlp.Layout(("x", "y")))
    biases = dict.fromkeys(("up.bias", "down.bias"), ("y", "x"))
    made = replace(made, step=mlp.step_program(made.parameters, ("x", "y"), biases))
    _, second = recorded(made, monkeypatch)
    sizes = sorted(size for kind, size in second if kind == "reduce")
    assert sizes == [1, mlp.HIDDEN + mlp.OUT, mlp.IN + mlp.HIDDEN * (mlp.IN + mlp.OUT)]


@pytest.mark.parametrize("storage", ["replicated", "zero1", "zero2", "zero3"])
def test_a_run_repeats_to_the_bit(storage: str) -> None:
    made = mlp.program(mlp.with_time(MESH, 2), mlp.Layout(("x", "y"), storage=storage))
    runs = [
        rt.run_threads(made.mesh, lambda comm: mlp.parallel(comm, made, mlp.adamw, clip_norm=0.5))
        for _ in range(2)
    ]
    for left, right in zip(*runs, strict=True):
        assert mlp.difference(left, right) == 0.0
        assert mlp.difference(left, runs[0][0]) == 0.0
