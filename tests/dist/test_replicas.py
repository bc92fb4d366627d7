"""Replicas of a model that run different numbers of microbatches, against one device."""

import random
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parloom import runtime as rt
from parloom.cost.clusters import load_cluster
from parloom.cost.pipeline import send
from parloom.cost.stages import PricedStages, StagePlayer, simulate_stages
from parloom.errors import CutError, InputError, VerifyError
from parloom.execute import checkpoint
from parloom.execute.ranks import fork_ranks
from parloom.ir.graph import Graph
from parloom.ir.lower_stages import lower_stages
from parloom.ir.plan import Action, Decisions, Optimizer, Stage
from parloom.ir.schedules import STEP
from parloom.ir.stages import cut_plan, stage_items
from parloom.ir.verify import verify_decisions
from parloom.runtime.shared import SharedParameters
from tests.dist import lowered, staged
from tests.dist.staged import MESHES, drawn, randomly_cut

Shares = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """The devices of each stage of each replica, and the microbatches of each replica."""

    shapes: tuple[tuple[int, ...], ...]
    shares: Shares

    @property
    def count(self) -> int:
        return sum(map(len, self.shares))


CASES = (
    Case(((1,), (1,)), ((0, 1, 2), (3,))),
    Case(((1,), (1,), (1,)), ((0, 3), (1,), (2,))),
    Case(((1, 1), (1,)), ((0, 2), (1, 3))),
    Case(((2,), (1,)), ((0,), (1,))),
    Case(((1, 2), (2,), (1,)), ((1, 3), (0,), (2,))),
)


def replicas(graph: Graph, case: Case, seed: int) -> Decisions:
    """Each replica in stages of random items; with random layouts of those on two devices."""
    rng = random.Random(seed)
    whole = drawn(graph, [stage_items(graph)], [2], num_microbatches=case.count, seed=seed)
    stages: list[Stage] = []
    lists: list[tuple[Action, ...]] = []
    first = 0
    for sizes, own in zip(case.shapes, case.shares, strict=True):
        items = [stage_items(graph)]
        while len(items) != len(sizes):
            items = randomly_cut(graph, len(sizes), rng)
        kinds = rng.choice(("FB", "FBW"))
        for keys, size in zip(items, sizes, strict=True):
            passes = [Action(kind, m, len(stages)) for m in own for kind in kinds]
            lists.append((*passes, *STEP))
            stages.append(Stage(keys, (range(first, first + size),), MESHES[size], own))
            first += size
    return replace(whole, stages=tuple(stages), schedule="listed", actions=tuple(lists))


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["mlp", "gpt", "hf_gpt2", "hf_llama", "dlrm"])
def test_replicas_equal_one_device(name: str, case: Case) -> None:
    """Tied weights (GPT-2), dropout (Llama), tables."""
    model = lowered.model(name)
    for seed in range(2):
        plan = replicas(model.graph, case, seed)
        report = staged.report(model, plan, staged.reference(name))
        assert report.passed, str(report)


def test_a_replica_that_sends_no_gradients_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = lowered.model("gpt"), replicas(lowered.model("gpt").graph, CASES[0], 0)
    monkeypatch.setattr(SharedParameters, "reduce", lambda self, spans: None)
    assert not staged.report(model, plan, staged.reference("gpt")).passed


def test_owners_share_the_work() -> None:
    """What each replica owns of the weights differs by the largest of them at most."""
    graph = lowered.model("hf_gpt2").graph
    shared = cut_plan(graph, replicas(graph, CASES[1], 0)).shared
    sizes = {i.target: i.value.spec.num_elements for i in graph.of_kind("parameter")}
    assert shared.keys() == sizes.keys()
    owned = [0, 0, 0]
    for name, stages in shared.items():
        assert sorted(stages) == [0, 1, 2]
        owned[stages[0]] += sizes[name]
    assert max(owned) - min(owned) <= max(sizes.values())


@pytest.mark.parametrize(("name", "beyond"), [("mlp", 1.05), ("dlrm", 1.05), ("hf_gpt2", 1.0)])
def test_the_replica_that_moves_the_most_is_priced(name: str, beyond: float) -> None:
    """Where one weight is much of a model, its owner has more to do than a fair share."""
    model, cluster = lowered.model(name), load_cluster("3x1xcpu")
    plan = replicas(model.graph, CASES[1], 0)
    priced = PricedStages(
        lower_stages(model.graph, plan), plan.stages, StagePlayer(cluster, Optimizer("sgd", 0))
    )
    pipeline = staged.compiled(model, plan).pipeline
    moved = 0
    for way in ("gradients", "weights"):
        sent, received = [0] * 3, [0] * 3
        for copy in SharedParameters(
            pipeline, (), _Alone(pipeline.mesh), torch.device("cpu")
        )._copies:
            for piece in getattr(copy, way) if copy.trained else ():
                size = prod(piece.shape) * copy.dtype.itemsize
                sent[piece.sender] += size
                received[piece.receiver] += size
        moved += max(*sent, *received)
        assert max(*sent, *received) > beyond * sum(sent) / 3
    (shared,) = priced.shared
    assert shared.sent == send(moved, moved, priced.join_of(0, 1))


def test_each_replica_computes_the_prologue_of_all_microbatches() -> None:
    """Also of those that others run: the number of labels is that of the whole batch."""
    graph = lowered.model("mlp").graph
    plan = replicas(graph, CASES[1], 0)
    stages = lower_stages(graph, plan)
    assert all(pcg.hoisted for pcg in stages.pcgs)
    for process in simulate_stages(stages, load_cluster("3x1xcpu"), plan).processes:
        names = [span.name for span in process.spans if span.name.startswith("P")]
        assert names == [f"P{microbatch}" for microbatch in range(CASES[1].count)]


class _Alone(rt.SingleComm):
    """A rank that connects to nobody."""

    def connect(self, pairs: object, device: object) -> None:
        return None


def trained(
    pipeline: rt.Pipeline, model: lowered.Model, folder: Path | None, steps: int
) -> dict[str, Tensor]:
    """Load where there is something, train, and save where there is a place."""
    torch.set_num_threads(1)
    trainer = rt.Trainer(
        pipeline,
        model.tensors,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1),
        comm=rt.DistributedComm(pipeline.mesh),
        exact_random=True,
        clip_norm=0.5,
        evaluation=pipeline,
    )
    if folder is not None and folder.exists():
        checkpoint.load(trainer, folder)
    loss = [trainer.step(model.batch).loss for _ in range(steps)][-1]
    if folder is not None and not folder.exists():
        checkpoint.save(trainer, folder).wait()
    return trainer.state_dict() | {"loss": loss, "judged": trainer.evaluate(model.batch).loss}


def test_checkpoints_evaluation_and_clipping(tmp_path: Path) -> None:
    """With gloo; a checkpoint of replicas loads on one device, and the other way around."""
    model = lowered.model("gpt")
    plans = {"replicas": replicas(model.graph, CASES[2], 1), "alone": Decisions()}
    made = {name: staged.compiled(model, plan).pipeline for name, plan in plans.items()}

    def run(name: str, folder: Path | None, steps: int) -> dict[str, Tensor]:
        ranks = made[name].num_ranks
        return fork_ranks(ranks, trained, made[name], model, folder, steps, timeout_s=120)[-1]

    expected = run("alone", None, 3)
    for saved in plans:
        run(saved, tmp_path / saved, 2)
        for loaded in plans:
            found = run(loaded, tmp_path / saved, 1)
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        (((0, 1), (1, 2, 3)), "microbatch 1 of 4 is run by 2 replicas"),
        (((0, 1), (3,)), "microbatch 2 of 4 is run by 0 replicas"),
        (((0, 1, 2), (3, 4)), "microbatch 4 of 4 is run by 1 replica;"),
    ],
)
def test_each_microbatch_is_run_once(shares: Shares, said: str) -> None:
    graph = lowered.model("gpt").graph
    plan = replicas(graph, CASES[0], 0)
    stages = tuple(replace(s, microbatches=m) for s, m in zip(plan.stages, shares, strict=True))
    with pytest.raises(VerifyError, match=said):
        verify_decisions(graph, replace(plan, stages=stages))


def test_what_replicas_cannot_have() -> None:
    graph = lowered.model("gpt").graph
    plan = replicas(graph, CASES[0], 0)
    with pytest.raises(VerifyError, match="1f1b runs the same microbatches in every stage"):
        verify_decisions(graph, replace(plan, schedule="1f1b", actions=()))
    short = (plan.actions[0][1:], plan.actions[1])
    with pytest.raises(VerifyError, match="lacks F0: 3 microbatches run"):
        verify_decisions(graph, replace(plan, actions=short))
    norm = lowered.model("cnn").graph
    with pytest.raises(CutError, match="is computed from all samples of a step"):
        cut_plan(norm, replace(plan, num_microbatches=2))


@pytest.mark.parametrize("case", [CASES[0], CASES[2]])
def test_replicas_are_given_one_batch(case: Case) -> None:
    """Each cuts its microbatches out of the batch that it is given."""
    model = lowered.model("gpt")
    pipeline = staged.compiled(model, replicas(model.graph, case, 0)).pipeline

    def run(comm: rt.Comm) -> None:
        trainer = rt.Trainer(
            pipeline,
            model.tensors,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            comm=comm,
        )
        mine = {
            name: tensor.flip(0) if comm.rank else tensor for name, tensor in model.batch.items()
        }
        with pytest.raises(InputError, match=r"input '\w+' differs"):
            trainer.step(mine)

    rt.run_threads(pipeline.mesh, run)


def test_what_the_optimizer_writes_reaches_all_replicas() -> None:
    model = lowered.model("mlp")
    pipeline = staged.compiled(model, replicas(model.graph, CASES[0], 0)).pipeline

    def run(comm: rt.Comm) -> Tensor:
        def optimizer(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
            with torch.no_grad():
                for _, parameter in named:
                    parameter.fill_(0.01)
            return torch.optim.SGD([p for _, p in named], lr=0.0)

        trainer = rt.Trainer(pipeline, model.tensors, optimizer=optimizer, comm=comm)
        helds = trainer.parts[0].store.helds.values()
        return torch.stack([held.owned.detach().mean() for held in helds])

    for found in rt.run_threads(pipeline.mesh, run):
        torch.testing.assert_close(found, torch.full_like(found, 0.01))


def test_one_microbatch_of_several_keeps_its_gradients() -> None:
    """Memory of a replica that runs one, against one that runs two."""
    model, cluster = lowered.model("mlp"), load_cluster("2xcpu")
    peaks = []
    for shares in (((0, 1), (2, 3)), ((0, 1, 2), (3,))):
        plan = replicas(model.graph, Case(((1,), (1,)), shares), 0)
        lists = tuple(tuple(a for a in own if a.kind != "W") for own in plan.actions)
        plan = replace(plan, actions=lists)
        timeline = simulate_stages(lower_stages(model.graph, plan), cluster, plan)
        peaks.append(timeline.processes[1].memory.peak)
    assert peaks[0] == peaks[1]
