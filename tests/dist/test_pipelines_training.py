"""Training of pipelines beside the loss: what nobody trains, shared weights, what logs say."""

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parloom import api, zoo
from parloom import runtime as rt
from parloom.capture import capture, parameters_of
from parloom.execute import checkpoint
from parloom.execute.optimizers import make, named_optimizer
from parloom.execute.ranks import fork_ranks
from parloom.execute.verify import assemble
from parloom.ir.lower_stages import group_lists
from parloom.ir.mesh import Mesh, grid
from parloom.ir.plan import Action, Decisions, ParameterDecision, Stage, Storage
from parloom.ir.schedules import STEP
from parloom.ir.stages import cut, stage_items
from parloom.runtime.optimizer import OPTIMIZERS
from parloom.runtime.passes import Passes
from parloom.runtime.spans import ActionSpan
from tests.dist import lowered, staged

LATE_S = 0.2


class Frozen(nn.Module):
    """A frozen table that two stages read, a head that nobody does, and rates by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.table(self.first(x))))
        out: Tensor = self.table(hidden).square().mean()
        return out


def frozen_run(
    pipeline: rt.Pipeline,
    tensors: dict[str, Tensor],
    batch: dict[str, Tensor],
    folder: Path,
    scale: float,
) -> tuple[float, dict[str, Tensor], list[float]]:
    """Save the first time; then start from other weights, load, and train."""
    rates = {"first.weight": 0.1, "second.weight": 0.2}
    trainer = rt.Trainer(
        pipeline,
        {name: tensor * scale for name, tensor in tensors.items()},
        optimizer=lambda named: torch.optim.SGD(
            [{"params": [p], "lr": rates.get(n, 0.3)} for n, p in named], lr=0.3
        ),
        comm=rt.DistributedComm(pipeline.mesh),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    if folder.exists():
        checkpoint.load(trainer, folder)
    else:
        trainer.step(batch)
        checkpoint.save(trainer, folder).wait()
    loss = float(trainer.step(batch).loss)
    return loss, trainer.state_dict(), [group["lr"] for group in trainer.optimizer.param_groups]


def test_checkpoints_have_what_nobody_trains(tmp_path: Path) -> None:
    """Copies of frozen parameters, parameters that nobody reads, and rates of each group."""
    model = lowered.of(Frozen(), {"x": torch.randn(8, 4)})
    items = stage_items(model.graph)
    storage = Storage(("x",), 0), Storage(("x",), 0), Storage(("x", "y"), 0)
    mesh = grid({"x": 2, "y": 2})
    plan = Decisions(
        (Stage(items[:3], (range(1),), Mesh(())), Stage(items[3:], (range(1, 5),), mesh)),
        parameters=(ParameterDecision("second.weight", *storage),),
        schedule="1f1b",
    )
    pipelines = [staged.compiled(model, p).pipeline for p in (plan, Decisions())]

    def run(pipeline: rt.Pipeline, scale: float) -> tuple[float, dict[str, Tensor], list[float]]:
        given = pipeline, model.tensors, model.batch, tmp_path / "saved", scale
        return fork_ranks(pipeline.num_ranks, frozen_run, *given, timeout_s=120)[-1]

    loss, state, _ = run(pipelines[0], 1.0)
    assert set(state) == set(model.tensors)
    for pipeline in pipelines:
        again, found, rates = run(pipeline, 3.0)
        assert again == pytest.approx(loss, rel=1e-12)
        assert {rate * 4 for rate in rates} <= {0.1, 0.2, 0.3}
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [n for n, entry in OPTIMIZERS.items() if not entry.why_whole])
def test_the_state_of_each_optimizer_is_saved_and_loaded(name: str) -> None:
    """Stages begin with stand-ins of each other's parameters, some with a state at once."""
    model = lowered.of(Frozen(), {"x": torch.randn(8, 4)})
    stages = staged.even(model.graph, 2)
    pipeline = staged.compiled(model, staged.drawn(model.graph, stages, [1, 2])).pipeline

    def run(comm: rt.Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The weights after two steps, and those of another trainer that loads between them."""
        one, other = (
            rt.Trainer(
                pipeline,
                {n: tensor * scale for n, tensor in model.tensors.items()},
                optimizer=lambda named: make(named_optimizer(name), named, lr=0.1, eps=1e-8),
                comm=comm,
            )
            for scale in (1.0, 3.0)
        )
        one.step(model.batch)
        saved = json.loads(json.dumps(one.extra_state()))
        shards = {shard.name: shard.tensor.clone() for shard in one.shards()}
        other.load_extra_state(saved)
        for shard in other.shards():
            shard.tensor.copy_(shards.pop(shard.name))
        assert not shards
        other.refresh()
        for trainer in (one, other):
            trainer.step(model.batch)
        return one.state_dict(), other.state_dict()

    for expected, found in rt.run_threads(pipeline.mesh, run):
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key


class Detached(nn.Module):
    """A weight that two stages read, and that no loss reaches in the last one, or in neither."""

    def __init__(self, *, everywhere: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.everywhere = everywhere

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.detach() if self.everywhere else self.scale
        y = self.first(x) * scale
        found: Tensor = (self.second(y) * self.scale.detach()).square().mean()
        return found


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_shared_weight_that_no_loss_reaches_is_left_alone(everywhere: bool) -> None:
    """Zeros in the place of no gradient would have AdamW let the weight decay."""
    model = lowered.of(Detached(everywhere=everywhere), {"x": torch.randn(8, 4)})
    items = stage_items(model.graph)
    after = next(i for i, item in enumerate(items) if "second" in item)
    plan = Decisions(
        (
            Stage(items[:after], (range(1),), Mesh(())),
            Stage(items[after:], (range(1, 3),), grid({"x": 2})),
        ),
        num_microbatches=2,
        schedule="1f1b",
    )
    assert "scale" in cut(model.graph, [stage.items for stage in plan.stages]).shared

    def run(comm: rt.Comm) -> dict[str, Tensor]:
        pipeline = staged.compiled(model, plan if comm.mesh.num_ranks > 1 else Decisions()).pipeline
        trainer = rt.Trainer(
            pipeline,
            model.tensors,
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], weight_decay=0.5),
            comm=comm,
        )
        for _ in range(2):
            trainer.step(model.batch)
        return trainer.state_dict()

    (alone,) = rt.run_threads(staged.compiled(model, Decisions()).pipeline.mesh, run)
    moved = not torch.equal(alone["scale"], model.tensors["scale"])
    assert moved is not everywhere
    for state in rt.run_threads(staged.compiled(model, plan).pipeline.mesh, run):
        torch.testing.assert_close(state["scale"], alone["scale"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_shared_weights_with_masters(sizes: tuple[int, int]) -> None:
    """What the optimizer updates is finer than what stages compute with, in the owner and in the
    copy.
    """
    module, batch = zoo.build("gpt", batch=4, seq=6, width=12, heads=2, depth=2, vocab=20)
    graph = capture(module, batch)
    model = lowered.Model(graph, parameters_of(module, graph), batch)
    begin = sizes[0]
    ranges = range(begin), range(begin, sum(sizes))
    stages = tuple(
        Stage(items, (own,), staged.MESHES[len(own)])
        for items, own in zip(staged.even(graph, 2), ranges, strict=True)
    )
    alone = Decisions(master_dtype="float64")
    plan = replace(alone, stages=stages, num_microbatches=2, schedule="1f1b")
    assert cut(graph, [stage.items for stage in stages]).shared
    one, two = (staged.compiled(model, decisions).pipeline for decisions in (alone, plan))
    expected, found = (assemble(staged.train(pipeline, model)) for pipeline in (one, two))
    for name, tensor in expected.state.items():
        assert not torch.equal(tensor, model.tensors[name].to(tensor.dtype))
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-4, atol=1e-5)


def four_steps(folder: Path) -> None:
    """Stage 0 takes `LATE_S` longer for each forward pass; the last step is observed, too."""
    torch.set_num_threads(1)
    forward = Passes.forward

    def late(self: Passes, microbatch: int) -> None:
        time.sleep(LATE_S if self._part.stage == 0 else 0.0)
        forward(self, microbatch)

    Passes.forward = late  # type: ignore[method-assign]
    model, batch = zoo.build("mlp", batch=16)
    trainer = api.parallelize(
        model,
        folder,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named]),
        log_path=folder / "log.jsonl",
    )
    for step in range(4):
        result = trainer.step(batch, observed=step == 3)
        assert bool(result.spans) == (step >= 2)
    trainer.log.close()


def test_observed_steps_tell_when_stages_ran_and_waited(tmp_path: Path) -> None:
    plan = api.plan("zoo:mlp", batch=16, cluster="2xcpu", devices=2, method="gpipe", microbatches=2)
    assert len(plan.decisions.stages) == 2
    assert plan.prediction is not None
    assert len(plan.prediction.waits_s) == 2
    assert 0 < max(plan.prediction.waits_s) < plan.prediction.step_s
    # As of a calibrated plan, so that it is compared.
    known = replace(plan, prediction=replace(plan.prediction, source="calibrated"))
    api.save(known, tmp_path)
    assert api.load(tmp_path).prediction == known.prediction
    fork_ranks(2, four_steps, tmp_path, timeout_s=120)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    waits = [line for line in lines if "waits" in line]
    assert [(line["step"], line["stages"]) for line in waits] == [
        (3, [0]), (3, [1]), (4, [0]), (4, [1]),
    ]  # fmt: skip
    for line, wait_s in zip(waits, 2 * plan.prediction.waits_s, strict=True):
        assert line["predicted"] == pytest.approx(wait_s / plan.prediction.step_s)
        assert 0 <= line["waits"] <= 1
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    first, second = api.observed(known, tmp_path / "log.jsonl")
    for of_stage, (_, own) in zip((first, second), group_lists(known.decisions), strict=True):
        before = ["1P"] if of_stage is second else []  # the number of labels, which the loss reads
        assert [span.action for span in of_stage.actions] == [*before, *map(str, own)]
        assert all(a.end_s <= b.begin_s for a, b in pairwise(of_stage.actions))
        assert all(s.begin_s + s.waited_s <= s.end_s for s in of_stage.actions)
    count = plan.decisions.num_microbatches
    assert first.actions[0].end_s >= LATE_S
    assert second.actions[1].waited_s >= 0.9 * LATE_S
    assert sum(span.waited_s for span in second.actions) >= 0.5 * LATE_S * count
    assert sum(span.waited_s for span in first.actions[:count]) == 0.0


def late_step(pipeline: rt.Pipeline, model: lowered.Model) -> tuple[ActionSpan, ...]:
    """Clips; stage 0 takes `LATE_S` longer for each backward pass."""
    torch.set_num_threads(1)
    backward = Passes.backward

    def late(self: Passes, microbatch: int) -> None:
        time.sleep(LATE_S if self._part.stage == 0 else 0.0)
        backward(self, microbatch)

    Passes.backward = late  # type: ignore[method-assign]
    trainer = rt.Trainer(
        pipeline,
        model.tensors,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        comm=rt.DistributedComm(pipeline.mesh),
        clip_norm=0.5,
    )
    return trainer.step(model.batch, observed=True).spans


@pytest.mark.parametrize(("replicas", "waits"), [(True, "REDUCE"), (False, "STEP")])
def test_updates_tell_how_long_they_waited_for_gradients(replicas: bool, waits: str) -> None:
    """Of weights that replicas share, or of all for their norm."""
    model = lowered.model("mlp")
    items = stage_items(model.graph)
    own = [(items, (0,)), (items, (1,))] if replicas else [(items[:2], ()), (items[2:], ())]
    stages = tuple(
        Stage(keys, (range(i, i + 1),), Mesh(()), shares) for i, (keys, shares) in enumerate(own)
    )
    lists = tuple(
        (*(Action(kind, i if replicas else 0, i) for kind in "FB"), *STEP) for i in range(2)
    )
    plan = Decisions(stages, num_microbatches=1 + replicas, schedule="listed", actions=lists)
    spans = fork_ranks(2, late_step, staged.compiled(model, plan).pipeline, model)[1]
    (waiting,) = [span for span in spans if span.action == waits]
    assert waiting.waited_s >= 0.9 * LATE_S
