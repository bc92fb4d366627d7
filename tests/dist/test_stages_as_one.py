"""What a pipeline's ranks do with what only some stages have: as a plan of one stage would."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parloom import api, zoo
from parloom import runtime as rt
from parloom.comparators.baselines import METHODS
from parloom.cost.clusters import load_cluster
from parloom.cost.stages import simulate_stages
from parloom.errors import InputError
from parloom.execute.program import NO_EVALUATION
from parloom.ir.lower_stages import group_lists, lower_stages
from parloom.ir.plan import Decisions, Stage
from parloom.ir.plan_json import plan_to_json
from tests.dist import lowered, staged
from tests.dist.staged import drawn, even
from tests.dist.test_auto_pipelines import CLUSTER

Named = list[tuple[str, nn.Parameter]]
Makers = Callable[[Named], torch.optim.Optimizer]


def head_alone(named: Named) -> torch.optim.Optimizer:
    """Parameters of the last stage only."""
    return torch.optim.AdamW([p for name, p in named if name.startswith("norm.")], lr=1e-2)


def by_shape(named: Named) -> torch.optim.Optimizer:
    """Decay for matrices alone, of which stages have all, some or none; and by the order."""
    matrices = [p for _, p in named if p.dim() > 1]
    others = [p for _, p in named if p.dim() <= 1]
    groups = [
        {"params": matrices[:3], "weight_decay": 0.1, "lr": 0.1},
        {"params": matrices[3:], "weight_decay": 0.2},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def named_groups(named: Named) -> torch.optim.Optimizer:
    """Groups that know their parameters' names."""
    low = [(name, p) for name, p in named if name.startswith("blocks.0")]
    rest = [(name, p) for name, p in named if not name.startswith("blocks.0")]
    groups: list[dict[str, Any]] = [{"params": low, "lr": 1e-3}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=1e-2)


def trained(
    decisions: Decisions, maker: Makers
) -> list[tuple[list[Tensor], dict[str, Tensor], Any]]:
    model = lowered.model("gpt")
    pipeline = staged.compiled(model, decisions).pipeline

    def run(comm: rt.Comm) -> tuple[list[Tensor], dict[str, Tensor], Any]:
        trainer = rt.Trainer(pipeline, model.tensors, optimizer=maker, comm=comm, exact_random=True)
        losses = [trainer.step(model.batch).loss for _ in range(3)]
        groups = [len(g["params"]) for g in trainer.optimizer.param_groups]
        return losses, trainer.state_dict(), groups

    return rt.run_threads(pipeline.mesh, run)


@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 2, 1]])
@pytest.mark.parametrize("maker", [head_alone, by_shape, named_groups])
def test_optimizers_of_some_parameters(maker: Makers, sizes: list[int]) -> None:
    graph = lowered.model("gpt").graph
    ((losses, state, groups),) = trained(Decisions(), maker)
    plan = drawn(graph, even(graph, 3), sizes, schedule="1f1b", num_microbatches=2, seed=3)
    found = trained(plan, maker)
    for own, tensors, _ in found:
        for one, other in zip(own, losses, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-8, atol=1e-10)
    assert all(len(counts) == len(groups) for *_, counts in found)


def test_optimizers_that_read_values_of_other_stages() -> None:
    graph = lowered.model("gpt").graph

    def maker(named: Named) -> torch.optim.Optimizer:
        rates = [{"params": [p], "lr": 1e-3 * float(p.detach().abs().mean())} for _, p in named]
        return torch.optim.SGD(rates, lr=0.1)

    trained(Decisions(), maker)
    with pytest.raises(Exception, match=r"reads values of .*; ranks hold parts"):
        trained(drawn(graph, even(graph, 2), [1, 1], num_microbatches=2), maker)


def test_ranks_of_different_stages_load_the_same_weights() -> None:
    model = lowered.model("gpt")
    plan = drawn(model.graph, even(model.graph, 2), [1, 1], num_microbatches=2)
    pipeline = staged.compiled(model, plan).pipeline

    def run(comm: rt.Comm) -> str:
        trainer = rt.Trainer(
            pipeline,
            model.tensors,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            comm=comm,
        )
        trainer.load_state_dict(model.tensors)
        other = {name: t + comm.rank for name, t in model.tensors.items()}
        with pytest.raises(InputError, match="differ between ranks") as raised:
            trainer.load_state_dict(other)
        return str(raised.value)

    assert len(set(rt.run_threads(pipeline.mesh, run))) == 1


class Scaled(nn.Module):
    """Evaluation undoes a scale that training does not read."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        if not self.training:
            out = out * self.scale
        return out.square().mean()


def scaled() -> tuple[nn.Module, dict[str, Tensor]]:
    return Scaled(), {"x": torch.ones(8, 8)}


def test_state_that_evaluation_alone_reads_in_another_stage_is_told() -> None:
    asked: dict[str, Any] = {"cluster": "2xcpu", "optimizer": "sgd"}
    one = api.plan(f"{__name__}:scaled", pin=["stages=1"], **asked)
    assert not any(NO_EVALUATION in note for note in one.notes)
    two = api.plan(f"{__name__}:scaled", pin=["stages=2"], **asked)
    (note,) = [note for note in two.notes if NO_EVALUATION in note]
    assert "evaluation reads scale in stage 1" in note


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_one_microbatch_pays_for_its_reductions(schedule: str, tmp_path: Path) -> None:
    """Gradients are summed over replicas of the data however the backward pass is cut."""
    path = tmp_path / "slow.yaml"
    path.write_text(CLUSTER)  # four devices on a slow network
    cluster, model = load_cluster(str(path)), lowered.model("gpt")
    whole = next(iter(METHODS["data_parallel"](model.graph, load_cluster("2xcpu"), 1, 0)))
    stages = tuple(
        Stage(items, (range(2 * i, 2 * i + 2),), whole.mesh)
        for i, items in enumerate(even(model.graph, 2))
    )
    plan = replace(whole, stages=stages, schedule=schedule)
    played = simulate_stages(lower_stages(model.graph, plan), cluster, plan)
    for process, own in zip(played.processes, lower_stages(model.graph, plan).pcgs, strict=True):
        sizes = [p.input.value.spec.num_bytes for p in own.parameters if p.input.trainable]
        least_ps = sum(sizes) / cluster.levels[0].link.bandwidth_bytes_per_s * 1e12
        assert dict(process.waited)["gradients all_reduce"] > 0.5 * least_ps


def two_blocks() -> tuple[nn.Module, dict[str, Tensor]]:
    return zoo.build("gpt", batch=8, seq=16, width=32, depth=2)


def test_edited_plan_files_are_refused(tmp_path: Path) -> None:
    captured = api.capture(f"{__name__}:two_blocks")
    plan = api.search(captured, cluster="2xcpu", pin=["stages=2"], microbatches=4)
    path = tmp_path / "plan.json"
    text = plan_to_json(plan)

    def again(changed: str, **asked: Any) -> None:
        path.write_text(changed)
        api.search(captured, **{"cluster": "2xcpu", "method": str(path)} | asked)

    again(text)
    document = json.loads(text)
    decisions = document["decisions"]
    decisions["activations"] = {"blokcs.0": "recompute"}
    with pytest.raises(InputError, match=r"no block 'blokcs\.0'.*did you mean"):
        again(json.dumps(document))
    listed = replace(plan.decisions, actions=(), schedule="1f1b")
    lists = tuple(own for _, own in group_lists(listed))
    searched = replace(plan, decisions=replace(listed, actions=lists, schedule="searched"))
    again(plan_to_json(searched))
    with pytest.raises(InputError, match="F2, which is not its to run"):
        again(plan_to_json(searched), microbatches=2)
    short = replace(searched.decisions, actions=lists[:1])
    with pytest.raises(InputError, match="1 action lists for 2 groups"):
        again(plan_to_json(replace(searched, decisions=short)))
    one = api.search(captured, cluster="1xcpu", method="data_parallel")
    odd = replace(one.decisions, actions=lists[:1])
    with pytest.raises(InputError, match="one stage has no action lists"):
        again(plan_to_json(replace(one, decisions=odd)), cluster="1xcpu")
