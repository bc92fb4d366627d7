"""Batches that some stage cannot read: every rank refuses them, and none waits for another."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from parloom import runtime as rt
from parloom.comparators.baselines import plain
from parloom.cost.clusters import load_cluster
from parloom.errors import InputError
from parloom.ir.plan import Decisions, Stage
from parloom.runtime import batches
from tests.dist import lowered, staged

MODEL = "gpt"
Batch = dict[str, Any]


def good() -> Batch:
    return dict(lowered.model(MODEL).batch)


def smaller() -> Batch:
    return {name: tensor[1:] for name, tensor in good().items()}


def without_labels() -> Batch:
    return {name: tensor for name, tensor in good().items() if name != "labels"}


REFUSED: list[tuple[Callable[[], Batch], str]] = [
    (smaller, "drop the last, smaller batch"),
    (lambda: {**good(), "labels": smaller()["labels"]}, "input 'labels' is .* drop the last"),
    (lambda: {**good(), "labels": good()["labels"].int()}, r"input 'labels' is int32.* cast it"),
    (lambda: {**good(), "labels": None}, "input 'labels' is a NoneType, not a tensor"),
    (without_labels, "the batch has .* the program takes"),
]


def on_ranks(
    function: Callable[[rt.Trainer], list[str]], decisions: Decisions | None = None
) -> None:
    """What `function` finds on each rank of three stages, the second of which reads no input, is
    the same on all.
    """
    model = lowered.model(MODEL)
    stages = staged.even(model.graph, 3)
    plan = decisions or staged.drawn(model.graph, stages, [1, 1, 2], num_microbatches=2)
    pipeline = staged.compiled(model, plan).pipeline
    assert [bool(program.inputs) for program in pipeline.programs] == [True, False, True]

    def run(comm: rt.Comm) -> list[str]:
        trainer = rt.Trainer(
            pipeline,
            model.tensors,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            comm=comm,
            evaluation=pipeline,
        )
        return function(trainer)

    found = rt.run_threads(pipeline.mesh, run, timeout_s=20)
    assert all(said == found[0] for said in found)


def refusals(call: Callable[[Batch], object]) -> list[str]:
    said = []
    for given, message in REFUSED:
        with pytest.raises(InputError, match=message) as refused:
            call(given())
        said.append(str(refused.value))
    return said


@pytest.mark.parametrize("evaluation", [False, True])
def test_all_ranks_refuse_what_some_stage_cannot_read(
    evaluation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word to each other, once all have shown that they are given everything."""
    asked: list[int] = []

    def counted(comm: rt.Comm, device: torch.device) -> AbstractContextManager[None]:
        asked.append(comm.rank)
        return rt.agreed(comm, device)

    monkeypatch.setattr(batches, "agreed", counted)

    def run(trainer: rt.Trainer) -> list[str]:
        call = trainer.evaluate if evaluation else trainer.step
        call(good())
        return refusals(call)

    on_ranks(run)
    assert sorted(asked) == [0, 1, 2, 3]


def test_all_ranks_refuse_a_first_batch_that_some_stage_cannot_read() -> None:
    """Those that were not given what is wrong are told."""

    def run(trainer: rt.Trainer) -> list[str]:
        refusals(trainer.step)
        return [str(trainer.step(good()).loss)]

    on_ranks(run)


def test_all_ranks_refuse_what_not_all_are_given() -> None:
    """The second stage is given nothing, in any step."""

    def run(trainer: rt.Trainer) -> list[str]:
        reads = trainer.comm.rank != 1
        for given, message in [(smaller, "drop the last"), (without_labels, "the batch has")] * 2:
            with pytest.raises(InputError, match=message):
                trainer.step(given() if reads else {})
            trainer.step(good() if reads else {})
        return []

    on_ranks(run)


def test_ranks_of_all_stages_are_told_of_other_samples_in_one() -> None:
    def run(trainer: rt.Trainer) -> list[str]:
        flipped = {**good(), "labels": good()["labels"].flip(0)}
        with pytest.raises(
            InputError, match="input 'labels' differs between ranks 2 and 3"
        ) as refused:
            trainer.step(flipped if trainer.comm.rank == 3 else good())
        return [str(refused.value)]

    on_ranks(run)


def test_local_batches_beside_a_stage_that_reads_none() -> None:
    """Its ranks get all samples, as their position says, or fewer: nobody reads them there."""
    graph = lowered.model(MODEL).graph
    whole = next(plain("data_parallel", graph, load_cluster("2xcpu")))
    stages = tuple(
        Stage(items, (range(2 * i, 2 * i + 2),), whole.mesh)
        for i, items in enumerate(staged.even(graph, 3))
    )

    def run(trainer: rt.Trainer) -> list[str]:
        replicas, place = trainer.sampler_position
        assert replicas == (1 if trainer.comm.rank in (2, 3) else 2)
        mine = {name: tensor[place::replicas] for name, tensor in good().items()}
        loss = trainer.step(mine, local=True).loss
        with pytest.raises(InputError, match="drop the last, smaller batch"):
            trainer.step({name: tensor[1:] for name, tensor in mine.items()}, local=True)
        reads = trainer.comm.rank not in (2, 3)
        last = mine if reads else {name: tensor[1:] for name, tensor in mine.items()}
        trainer.step(last, local=True)
        trainer.step(mine if reads else {}, local=True)
        return [str(loss)]

    on_ranks(run, Decisions(stages, whole.nodes, num_microbatches=2, schedule="1f1b"))
