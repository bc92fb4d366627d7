"""Microbatches that are computed by themselves equal gradient accumulation with the module
itself.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parloom import api
from parloom.capture import Loaded, capture
from parloom.capture.microbatch import Split, capture_microbatch, split_of
from parloom.comparators.baselines import METHODS, random_plan
from parloom.cost.clusters import load_cluster
from parloom.errors import InputError, VerifyError
from parloom.execute.eager_calls import training_calls
from parloom.execute.eager_compare import DIFFERS, EQUAL, compare
from parloom.execute.program import compile_pcg
from parloom.execute.ranks import fork_ranks
from parloom.ir.graph import Call, Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.plan import ActivationDecision, Decisions, Plan, one_stage
from parloom.ir.text import parse_graph, print_graph
from parloom.ir.verify import verify_decisions, verify_graph
from parloom.report.words import words
from parloom.runtime import Program
from tests import equality
from tests.dist import lowered
from tests.dist.lowered import Built, Model
from tests.equality import TOLERANCE, Outcome, difference, parallel
from tests.zoo_sizes import small

torch.set_num_threads(1)
SAMPLES, WIDTH, CLASSES, EXPERTS = 8, 6, 5, 3


class Block(nn.Module):
    """Batch norm and dropout, which may be recomputed."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), drop

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.norm(self.up(x))), self.drop, self.training)


class Coupled(nn.Module):
    """All that couples samples: statistics, a count of labels, shares of experts, a capacity."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drop) for _ in range(3))
        self.gate, self.head = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        gates = self.gate(x).softmax(-1)
        share = F.one_hot(gates.argmax(-1), EXPERTS).to(x.dtype).mean(0)
        capacity = -(-2 * x.shape[0] // EXPERTS)
        first = gates.topk(capacity, dim=0).values.sum()
        balance = EXPERTS * (share * gates.mean(0)).sum() + first / x.shape[0] ** 2
        loss: Tensor = F.cross_entropy(self.head(x), labels) + 0.1 * balance
        return loss


def built(drop: float = 0.0) -> Built:
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (SAMPLES,))
    labels[1:3] = -100  # counts of labels differ between microbatches, and none has none
    return Coupled(drop).double(), {"x": torch.randn(SAMPLES, WIDTH).double(), "labels": labels}


def accumulated(module: nn.Module, batch: dict[str, Tensor], count: int) -> Outcome:
    """What plain PyTorch leaves after one step of accumulation."""
    total = torch.zeros((), dtype=torch.float64)
    for index in range(count):
        size = SAMPLES // count
        part = {n: t[index * size : (index + 1) * size] for n, t in batch.items()}
        loss = module(**part) / count
        loss.backward()
        total += loss.detach()
    assert total.isfinite()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return Outcome(total, gradients, {}, dict(module.named_buffers()))


@cache
def model(count: int, drop: float = 0.0) -> Model:
    """The program of one microbatch, with the module's own state and the whole batch."""
    module, batch = built(drop)
    graph = capture_microbatch(module, batch, count)
    tensors = {n: t.detach().clone() for n, t in module.state_dict().items()}
    return Model(graph, tensors, batch)


def decided(found: Model, seed: int, count: int) -> Decisions:
    plan = random_plan(found.graph, found.factored, grid({"x": 2, "y": 2}), seed)
    return replace(plan, num_microbatches=count, batch_semantics="microbatch")


@pytest.mark.parametrize(("count", "seed"), [(2, 0), (2, 1), (4, 2)])
def test_a_random_plan_equals_accumulation_in_torch(count: int, seed: int) -> None:
    found = model(count)
    pcg = lower(found.graph, decided(found, seed, count), factored=found.factored)
    expected = accumulated(*built(), count)
    error, where = difference(expected, parallel(pcg, found.tensors, found.batch))
    assert error <= TOLERANCE, where


def test_it_is_not_the_loss_of_the_whole_batch() -> None:
    one, two = (accumulated(*built(), count).loss for count in (1, 2))
    assert abs(one - two) > 1e-3


def _global(program: Program) -> Program:
    return replace(program, by_microbatch=False)


def test_the_test_sees_buffers_that_are_updated_once_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = model(2)
    pcg = lower(found.graph, decided(found, 0, 2), factored=found.factored)
    monkeypatch.setattr(
        equality, "compile_pcg",
        lambda *given: replace(made := compile_pcg(*given), program=_global(made.program)),
    )  # fmt: skip
    error, where = difference(accumulated(*built(), 2), parallel(pcg, found.tensors, found.batch))
    assert error > 1e-3
    assert "buffers" in where


@pytest.mark.parametrize(("count", "dropped"), [(2, "all"), (4, "none"), (4, "values")])
def test_dropout_of_each_microbatch_with_recomputation(count: int, dropped: str) -> None:
    """What is recomputed reads the buffers and draws the masks of its own microbatch."""
    found = model(count, drop=0.3)
    calls = [i.prefix for i in found.graph.main.body if isinstance(i, Call)]
    assert calls
    values = ("norm:batch_norm#0", ":tanh#0", ":dropout#0") if dropped == "values" else ()
    policy = "keep" if dropped == "none" else "recompute"
    decisions = replace(
        decided(found, 1, count),
        activations=tuple(ActivationDecision(prefix, policy, values) for prefix in calls),
    )
    verify_decisions(found.graph, decisions)
    error, where = found.error(decisions)
    assert error <= TOLERANCE, where


@pytest.mark.parametrize(("name", "count"), [("cnn", 4), ("gshard", 2)])
def test_models_that_global_semantics_forbid(name: str, count: int) -> None:
    torch.manual_seed(0)
    module, batch = small(name)
    batch = {n: torch.cat([t, t.roll(1, 0).flip(-1)]) for n, t in batch.items()}
    found = lowered.of(module, batch, capture_microbatch(module, batch, count))
    decisions = random_plan(found.graph, found.factored, grid({"x": 2}), 0)
    decisions = replace(decisions, num_microbatches=count, batch_semantics="microbatch")
    error, where = found.error(decisions)
    assert error <= TOLERANCE, where


# The comparison of the captured program with the module.


def calls(count: int) -> list[Any]:
    _, batch = built()
    split = split_of(model(count, 0.3).graph, batch)
    assert split == Split(count, (("x", 0), ("labels", 0)))
    made = training_calls(lambda: Loaded(*built(0.3)), other=True, again=False, split=split)
    return list(made)


def test_the_program_equals_the_modules_own_accumulation() -> None:
    graph = print_graph(model(2, 0.3).graph)
    report = compare(calls(2), graph, print_graph(capture(*built(0.3), training=False)))
    assert report.outcome == EQUAL, report
    assert report.calls == 4
    assert report.worst <= 1e-12


def test_the_comparison_sees_another_number_of_microbatches() -> None:
    graph = print_graph(model(2).graph)
    whole = training_calls(lambda: Loaded(*built()), other=True, again=False)
    report = compare(list(whole), graph, "")
    assert report.outcome == DIFFERS
    assert "loss in call 1" in report.difference


# The main path.

FACTORY = """
from tests.dist.test_batch_semantics import built
build = built
"""


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(FACTORY)
    return f"{path}:build"


@pytest.fixture(scope="module")
def plan(factory: str) -> Plan:
    return api.plan(
        factory,
        cluster="2xcpu",
        devices=2,
        method="fsdp",
        microbatches=2,
        batch_semantics="microbatch",
    )


def test_the_plan_records_and_repeats_them(plan: Plan, tmp_path: Path) -> None:
    assert (plan.decisions.batch_semantics, plan.decisions.num_microbatches) == ("microbatch", 2)
    assert "--microbatches 2 --batch-semantics microbatch" in plan.command()
    assert parse_graph(plan.graph).sample_dims == {"x": 0, "labels": 0}
    api.save(plan, tmp_path)
    assert api.load(tmp_path) == plan
    explained = "\n".join(words(parse_graph(plan.graph), plan.decisions))
    assert "the mean of those of 2 microbatches, each computed by itself" in explained


@pytest.mark.sample(1)
@pytest.mark.parametrize("shrink", [False, True])
def test_the_plan_is_verified(plan: Plan, shrink: bool) -> None:
    report = api.verify(plan, shrink=shrink)
    assert report.passed, report
    assert ("2 of 3 blocks" in report.shrunk) == shrink
    assert report.eager is not None
    assert report.eager.outcome == EQUAL, report.eager


def _train(plan: Plan, local: bool) -> dict[str, Tensor]:
    module, batch = built()

    def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named, lr=0.1, eps=1e-4)

    trainer = api.parallelize(module, plan, optimizer=sgd)
    if local:  # of both microbatches this rank's samples
        rank = trainer.comm.rank
        batch = {n: torch.cat([t[2 * rank :][:2], t[4 + 2 * rank :][:2]]) for n, t in batch.items()}
    trainer.step(batch, local=local)
    state = trainer.state_dict()
    if not local:
        state["loss"] = trainer.evaluate(batch).loss
    return state


@pytest.mark.parametrize("local", [False, True])
def test_a_script_trains_as_accumulation_does(plan: Plan, local: bool) -> None:
    state = fork_ranks(2, _train, plan, local)[0]
    module, batch = built()
    accumulated(module, batch, 2)
    torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-4).step()
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9)
    if not local:
        with torch.no_grad():
            torch.testing.assert_close(state["loss"], module.eval()(**batch))


def test_one_microbatch_is_the_whole_batch(factory: str) -> None:
    found = api.plan(factory, cluster="2xcpu", method="data_parallel", batch_semantics="microbatch")
    assert found.decisions.num_microbatches == 1
    assert not parse_graph(found.graph).sample_dims


def test_a_plan_file_of_the_other_semantics_is_refused(
    plan: Plan, factory: str, tmp_path: Path
) -> None:
    path = str(api.save(plan, tmp_path)["plan"])
    with pytest.raises(InputError, match="add --batch-semantics microbatch --microbatches 2"):
        api.plan(factory, cluster="2xcpu", method=path)


def test_programs_and_decisions_belong_together() -> None:
    part, whole = model(2).graph, capture(*built())
    apart = Decisions(one_stage(grid({"x": 1})), num_microbatches=2, batch_semantics="microbatch")
    verify_decisions(part, apart)
    with pytest.raises(VerifyError, match="batch semantics are global"):
        verify_decisions(part, replace(apart, batch_semantics="global"))
    with pytest.raises(VerifyError, match="the program has all samples"):
        verify_decisions(whole, apart)


def _moved(change: Callable[[Any], Any]) -> Graph:
    graph = model(2).graph
    return replace(graph, inputs=tuple(map(change, graph.inputs)))


def test_samples_lie_in_a_dim_of_the_batch() -> None:
    verify_graph(_moved(lambda entry: entry))
    with pytest.raises(VerifyError, match="input 'x' has no dim 2 of samples"):
        verify_graph(_moved(lambda i: replace(i, samples=2) if i.target == "x" else i))
    with pytest.raises(VerifyError, match="has no dim 0 of samples"):
        verify_graph(_moved(lambda i: replace(i, samples=0) if i.kind == "parameter" else i))


def test_ranks_that_samples_of_a_microbatch_do_not_divide_over_do_the_same_work() -> None:
    found = next(METHODS["data_parallel"](model(2).graph, load_cluster("3xcpu"), 1, 0))
    assert [(axis.name, axis.size) for axis in found.mesh.axes] == [("copy", 3)]
    assert found.nodes == ()


def test_samples_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match=r"8 samples do not divide into 3 .* counts: 2, 4$"):
        capture_microbatch(*built(), 3)
