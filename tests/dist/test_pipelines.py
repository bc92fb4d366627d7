"""Pipelines against one device: every loss, gradient, weight and buffer over three steps."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from parloom import runtime as rt
from parloom.comparators.baselines import plain
from parloom.cost.clusters import load_cluster
from parloom.errors import CutError, InputError, LayoutError, VerifyError
from parloom.execute import checkpoint
from parloom.execute.ranks import fork_ranks
from parloom.execute.verify import assemble, compare, reference_trace, train_rank
from parloom.ir.graph import Call, Graph
from parloom.ir.plan import ActivationDecision, Decisions, Stage
from parloom.ir.stages import cut, item_key, stage_items
from parloom.runtime import transfers
from parloom.runtime.shared import SHARED, SharedParameters
from parloom.runtime.split_backward import SplitBackward
from parloom.runtime.threads import ThreadComm
from parloom.runtime.transfers import Transfers
from parloom.runtime.work import Work
from tests.dist import lowered, staged
from tests.dist.allocations import Allocations
from tests.dist.staged import drawn, even, pipeline_of, randomly_cut


def assert_proved(name: str, decisions: Decisions) -> None:
    report = staged.report(lowered.model(name), decisions, staged.reference(name))
    assert report.passed, str(report)


@pytest.mark.sample(13)
@pytest.mark.parametrize("seed", range(24))
def test_drawn_pipelines(seed: int) -> None:
    """Any items in any stage as long as no value goes back, on unequal meshes, with random layouts
    and storage: microbatches, tied weights (GPT-2), dropout (Llama), batch norm (CNN), branches.
    """
    rng = random.Random(seed)
    name = rng.choice(["mlp", "gpt", "hf_gpt2", "hf_llama", "dlrm", "cnn"])
    schedule = staged.SCHEDULES[seed % len(staged.SCHEDULES)]
    assert_proved(name, pipeline_of(lowered.model(name), schedule, rng.choice([2, 4, 4]), seed))


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(12))
def test_parts_of_sums_cross_no_stages(seed: int) -> None:
    """What is added is made in other stages: it leaves them whole, and arrives so."""
    schedule = staged.SCHEDULES[seed % len(staged.SCHEDULES)]
    assert_proved("sums", pipeline_of(lowered.model("sums"), schedule, 2, seed))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gpt", "hf_gpt2", "cnn", "hf_mixtral"])
def test_more_stages_than_two(name: str) -> None:
    """Skip connections over several stages; batch norm; experts that all stages' losses meet."""
    graph = lowered.model(name).graph
    count = 1 if name in ("cnn", "hf_mixtral") else 3
    for seed, schedule in enumerate(("1f1b", "zb_h1")):
        sizes = [2, 1, 2, 1]
        assert_proved(
            name,
            drawn(
                graph, even(graph, 4), sizes, schedule=schedule, num_microbatches=count, seed=seed
            ),
        )


@pytest.mark.parametrize("name", ["gpt", "hf_gpt2"])
def test_several_stages_on_a_rank(name: str) -> None:
    graph = lowered.model(name).graph
    for seed, sizes in enumerate(([1, 1], [2, 1])):
        chosen = drawn(
            graph, even(graph, 4), sizes, schedule="interleaved_1f1b", num_microbatches=4,
            chunks=2, seed=seed,
        )  # fmt: skip
        assert_proved(name, chosen)


def test_several_values_for_several_stages_of_a_rank() -> None:
    """Messages between two ranks keep one order, however many values and stages there are."""
    graph = lowered.model("dlrm").graph
    for seed in range(6):
        stages = randomly_cut(graph, 4, random.Random(seed))
        if len(stages) == 4:
            assert_proved(
                "dlrm", drawn(graph, stages, [2, 1], schedule="interleaved_1f1b", chunks=2)
            )


@pytest.mark.sample(3)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("name", ["gpt", "hf_llama"])
def test_recomputation_in_both_halves(name: str, schedule: str, whole: bool) -> None:
    """Blocks, or half of their values, are made again; their weights are gathered again, too."""
    graph = lowered.model(name).graph
    calls = [item for item in graph.main.body if isinstance(item, Call)]
    for seed in range(2):
        rng = random.Random(seed)
        activations = []
        for call in calls:
            keys = [item_key(item) for item in graph.by_name[call.function].body]
            values = () if whole else tuple(rng.sample(keys, len(keys) // 2))
            activations.append(ActivationDecision(call.prefix, "recompute", values))
        plan = drawn(
            graph, even(graph, 2), [2, 2], schedule=schedule, num_microbatches=2, seed=seed
        )
        assert_proved(name, replace(plan, activations=tuple(activations)))


class Cloned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.v = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        v = self.v.clone(memory_format=torch.contiguous_format)
        loss: Tensor = (self.b(torch.tanh(self.a(x)) * v) * v).square().sum()
        return loss


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.a(torch.tanh(self.b(torch.tanh(self.a(x)))))
        loss: Tensor = hidden.float().square().sum()
        return loss


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.w = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(self.a(x)) * torch.view_as_complex(self.w)
        loss: Tensor = self.b(torch.fft.irfft(found, n=8)).square().sum()
        return loss


class Permuted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        permutation, lower, upper = torch.linalg.lu(self.w)
        loss: Tensor = (self.a(x) @ lower @ upper @ permutation).square().sum()
        return loss


UNUSUAL: dict[str, type[nn.Module]] = {
    "cloned": Cloned, "cast": Cast, "spectral": Spectral, "permuted": Permuted,
}  # fmt: skip


def test_ranks_of_gloo() -> None:
    model = lowered.model("hf_gpt2")
    graph = model.graph
    plan = drawn(graph, even(graph, 3), [1, 2, 1], schedule="zb_h1", num_microbatches=4, seed=1)
    pipeline = staged.compiled(model, plan).pipeline
    parts = fork_ranks(
        4, train_rank, pipeline, staged.PLANNED, model.tensors, model.batch, timeout_s=120
    )
    report = compare(staged.reference("hf_gpt2"), assemble(parts), 4)
    assert report.passed, str(report)


def test_what_goes_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient doubled on its way, a value lost, weights' gradients left out, copies apart."""
    model = lowered.model("hf_gpt2")
    graph = model.graph
    plan = drawn(graph, even(graph, 2), [1, 2], schedule="zb_h1", num_microbatches=2)

    def fails(target: object, name: str, wrong: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, wrong)
            assert not staged.report(model, plan, staged.reference("hf_gpt2")).passed

    gradient, value = Transfers.receive_gradient, Transfers.receive
    fails(Transfers, "receive_gradient", lambda *given: 2 * gradient(*given))
    fails(Transfers, "receive", lambda *given: torch.zeros_like(value(*given)))

    def first_only(self: SplitBackward) -> None:
        self._late = self._late[:1]
        weights(self)

    weights = SplitBackward.weights
    fails(SplitBackward, "weights", first_only)
    fails(SharedParameters, "reduce", lambda self, spans=None: None)
    fails(SharedParameters, "publish", lambda self, spans=None, frozen=False: None)


def test_the_halves_of_a_backward_pass() -> None:
    """The first half makes no gradient of a weight that one operator reads, the second no other."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    first, second, twice = (
        torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in "abc"
    )

    def loss() -> Tensor:
        hidden = torch.tanh(x @ first.t()) @ twice
        return (torch.sigmoid(hidden @ second) @ twice).square().sum()

    expected = torch.autograd.grad(loss(), (x, first, second, twice))
    made = loss()
    halves = SplitBackward([get_gradient_edge(made)], [x])
    (found,) = halves.inputs([torch.ones_like(made)])
    assert found is not None
    assert torch.equal(found, expected[0])
    assert x.grad is first.grad is second.grad is twice.grad is None
    halves.weights()
    assert x.grad is None
    for weight, gradient in zip((first, second, twice), expected[1:], strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-14, atol=0)


def test_between_the_halves_there_is_what_the_second_one_reads() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    first, second = (torch.randn(8, 8, requires_grad=True) for _ in "ab")
    with Allocations() as found:
        made = (((x @ first).exp().sin().exp() @ second).tanh() * x / 3).cos()
        before, size = found.held, made.nbytes
        root = get_gradient_edge(made)
        del made
        halves = SplitBackward([root], [x])
        (gradient,) = halves.inputs([torch.ones(8, 8)])
        # Two operands of products, but one of them is `x`; two gradients that flow into products.
        assert gradient is not None
        assert found.held - gradient.nbytes == 3 * size < before
        del gradient
        halves.weights()
        assert found.held == 2 * size  # gradients of weights
    with pytest.raises(VerifyError, match="let go of"):
        torch.autograd.grad([root], [x], [torch.ones(8, 8)])


def test_what_is_sent_is_no_memory_of_a_gradient() -> None:
    """A weight that is viewed and added takes its gradient as it comes, and later ones are added
    there, while the gradient of what arrived may not have left yet.
    """
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    sent = []
    for _ in range(2):
        x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
        made = x + weight.unsqueeze(0)
        halves = SplitBackward([get_gradient_edge(made)], [x])
        (found,) = halves.inputs([torch.ones_like(made)])
        assert found is not None
        sent.append(found)
        halves.weights()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3, 4), 2.0, dtype=torch.float64))
    for found in sent:
        assert torch.equal(found, torch.ones(1, 3, 4, dtype=torch.float64))


def test_a_weight_that_leaves_as_it_is_gets_both_gradients() -> None:
    """One comes back from another stage, the other from a reader here; also where there is none."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    halves = SplitBackward([get_gradient_edge(weight)], [])
    halves.inputs([torch.full((3,), 2.0, dtype=torch.float64)])
    halves.weights()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3
    weight.grad = None
    x = torch.full((3,), 5.0, dtype=torch.float64, requires_grad=True)
    halves = SplitBackward([get_gradient_edge(weight), get_gradient_edge(x * weight)], [x])
    ones = torch.ones(3, dtype=torch.float64)
    halves.inputs([2 * ones, ones])
    halves.weights()
    found: Tensor | None = weight.grad
    assert found is not None
    assert found.tolist() == [7.0] * 3


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("name", ["cloned", "cast", "spectral", "permuted"])
def test_what_crosses_in_unusual_ways(name: str, schedule: str) -> None:
    """A weight whose copy is the weight itself, a cached cast of one, complex numbers, and the
    permutation of a factorization, which has no gradient.
    """
    torch.manual_seed(0)
    width = 8 if name == "spectral" else 4
    own = lowered.of(UNUSUAL[name](), {"x": torch.randn(6, width)})
    items = stage_items(own.graph)
    expected = reference_trace(own.graph, staged.PLANNED, own.tensors, own.batch)
    for at in range(1, len(items)):
        plan = drawn(
            own.graph, [items[:at], items[at:]], [1, 1], schedule=schedule, num_microbatches=2
        )
        report = staged.report(own, plan, expected)
        assert report.passed, f"cut at {at}: {report}"


def test_hooks_of_weights_run_once_in_the_second_half() -> None:
    weight = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    x = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    seen: list[float] = []
    weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda w: seen.append(float(w.grad.sum()))
    )
    made = ((x @ weight) @ weight).sum()
    halves = SplitBackward([get_gradient_edge(made)], [x])
    halves.inputs([torch.ones_like(made)])
    assert seen == []
    halves.weights()
    assert seen == [32.0]


def test_clipping_and_state_are_those_of_one_stage() -> None:
    """Norms count shared weights once, and all ranks have all tensors."""
    model = lowered.model("hf_gpt2")
    graph = model.graph
    plan = drawn(graph, even(graph, 3), [1, 2, 1], num_microbatches=3, seed=2)
    pipeline = staged.compiled(model, plan).pipeline
    alone = staged.compiled(model, Decisions()).pipeline

    def run(comm: rt.Comm) -> tuple[list[Tensor], dict[str, Tensor]]:
        trainer = rt.Trainer(
            pipeline if comm.mesh.num_ranks > 1 else alone,
            model.tensors,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            comm=comm,
            clip_norm=0.01,
            exact_random=True,
        )
        norms = [trainer.step(model.batch).grad_norm for _ in range(2)]
        assert all(norm is not None for norm in norms)
        return [n for n in norms if n is not None], trainer.state_dict()

    ((norms, state),) = rt.run_threads(alone.mesh, run)
    for found, tensors in rt.run_threads(pipeline.mesh, run):
        for one, other in zip(found, norms, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=0)
        assert tensors.keys() == state.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: [s[0]], "and .* more is in no stage|is in no stage; add it to one"),
        (lambda s: [s[0], s[1] + s[0][:1]], "is in stage 0 and in stage 1; leave it in one"),
        (lambda s: [s[0] + s[1], ()], "stage 1 has no items; give it some, or leave it out"),
        (lambda s: [s[1], s[0]], "made in stage 1 and read in stage 0, which comes before"),
        (lambda s: [s[0], (*s[1], "blocks.0.up:linear#0")], "inside of the block blocks.0"),
        (lambda s: [s[0], (*s[1], "head:linear#7")], "the model has no item 'head:linear#7'"),
    ],
)  # fmt: skip
def test_stages_that_are_no_cut(change: Callable[[Any], Any], said: str) -> None:
    graph = lowered.model("gpt").graph
    with pytest.raises(LayoutError, match=said):
        cut(graph, change(even(graph, 2)))


def interrupted(
    pipeline: rt.Pipeline,
    tensors: dict[str, Tensor],
    batch: dict[str, Tensor],
    folder: Path | None,
    steps: int,
) -> dict[str, Tensor]:
    """Train on, from the checkpoint if there is one, and save what comes of it."""
    trainer = rt.Trainer(
        pipeline,
        tensors,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, eps=1e-4),
        comm=rt.DistributedComm(pipeline.mesh),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        clip_norm=0.5,
        exact_random=True,
    )  # fmt: skip
    if folder is not None and folder.exists():
        checkpoint.load(trainer, folder)
    for _ in range(steps):
        trainer.step(batch)
    if folder is not None and not folder.exists():
        checkpoint.save(trainer, folder).wait()
    return trainer.state_dict()


def test_checkpoints_of_a_pipeline_load_under_any_plan_and_back(tmp_path: Path) -> None:
    """Tied weights, states of AdamW, the schedule; a stage of two ranks with no parameters."""
    model = lowered.model("hf_gpt2")
    items = stage_items(model.graph)
    stages = [items[:3], items[3:-1], items[-1:]]
    plans = {
        "pipeline": drawn(model.graph, stages, [1, 2, 2], schedule="zb_h1", num_microbatches=2),
        "one device": Decisions(),
        "other stages": drawn(
            model.graph, even(model.graph, 2), [2, 1], num_microbatches=4, seed=3
        ),
    }
    pipelines = {name: staged.compiled(model, plan).pipeline for name, plan in plans.items()}

    def run(name: str, folder: Path | None, steps: int) -> dict[str, Tensor]:
        given = pipelines[name], model.tensors, model.batch, folder, steps
        states = fork_ranks(pipelines[name].num_ranks, interrupted, *given, timeout_s=120)
        return states[-1]

    expected = run("one device", None, 3)
    for saved in plans:
        run(saved, tmp_path / saved, 2)
    for saved in plans:
        for loaded in plans:
            found = run(loaded, tmp_path / saved, 1)
            assert found.keys() == expected.keys()
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-10)


def test_ranks_are_given_what_their_stages_read() -> None:
    model = lowered.model("gpt")
    plan = drawn(model.graph, even(model.graph, 3), [1, 1, 1], num_microbatches=2)
    pipeline = staged.compiled(model, plan).pipeline
    read = [{spec.name for spec in program.inputs} for program in pipeline.programs]
    assert set() in [names & {"labels"} for names in read]

    def run(comm: rt.Comm) -> Tensor:
        trainer = rt.Trainer(
            pipeline,
            model.tensors,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            comm=comm,
        )
        mine = {name: model.batch[name] for name in read[comm.rank]}
        loss = trainer.step(mine).loss
        # Also where nothing is read: that rank is told.
        with pytest.raises(InputError, match="the batch has"):
            trainer.step({})
        return loss

    losses = rt.run_threads(pipeline.mesh, run)
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_ranks_look_at_their_own_messages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each when it is sent, when it is read, and once before the first step."""
    model = lowered.model("gpt")
    plan = drawn(model.graph, even(model.graph, 3), [2, 4, 2], num_microbatches=4)
    pipeline = staged.compiled(model, plan).pipeline
    looks, sent = [], []
    letter, send = transfers.Letter, ThreadComm.send

    def seen(*given: Any) -> transfers.Letter:
        looks.append(given)
        return letter(*given)

    def counted(self: ThreadComm, tensor: Tensor, to: int, tag: int) -> Work:
        sent.append(tag)
        return send(self, tensor, to, tag)

    monkeypatch.setattr(transfers, "Letter", seen)
    monkeypatch.setattr(ThreadComm, "send", counted)

    def run(comm: rt.Comm) -> None:
        trainer = rt.Trainer(
            pipeline,
            model.tensors,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            comm=comm,
        )
        trainer.step(model.batch)

    rt.run_threads(pipeline.mesh, run)
    assert len(looks) == 3 * sum(tag != SHARED for tag in sent) > 0


class Counts(nn.Module):
    """A buffer that two layers read and the model writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.seen: Tensor
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.seen
        out: Tensor = (self.second(hidden) * self.seen).square().mean()
        self.seen = self.seen + 1
        return out


def test_buffers_that_a_step_writes_are_read_in_one_stage() -> None:
    model = lowered.of(Counts(), {"x": torch.randn(4, 4)})
    items = stage_items(model.graph)
    with pytest.raises(CutError, match=r"seen is written in stage \d and read in stage \d"):
        cut(model.graph, [items[:4], items[4:]])
    for count in range(1, len(items)):
        try:
            plan = drawn(model.graph, [items[:count], items[count:]], [1, 2], schedule="zb_h1")
        except LayoutError:
            continue
        traced = reference_trace(model.graph, staged.PLANNED, model.tensors, model.batch)
        report = staged.report(model, plan, traced)
        assert report.passed, str(report)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1)])
def test_local_batches_of_stages(sizes: tuple[int, int]) -> None:
    """Stages that cut samples alike take local batches; where they do not, the global one."""
    model = lowered.model("gpt")
    graph, items = model.graph, stage_items(model.graph)
    whole = {n: next(plain("data_parallel", graph, load_cluster(f"{n}xcpu"))) for n in set(sizes)}
    begins = (0, sizes[0])
    stages = tuple(
        Stage(own, (range(begin, begin + n),), whole[n].mesh)
        for own, begin, n in zip((items[:3], items[3:]), begins, sizes, strict=True)
    )
    pipeline = staged.compiled(
        model, Decisions(stages, whole[2].nodes, num_microbatches=2, schedule="1f1b")
        if sizes == (2, 2)
        else Decisions(
            stages, tuple(n for n in whole[2].nodes if _of(graph, n.key, items[:3])),
            num_microbatches=2, schedule="1f1b",
        ),
    ).pipeline  # fmt: skip

    def run(comm: rt.Comm) -> tuple[tuple[int, int], Tensor, Tensor]:
        trainer = rt.Trainer(
            pipeline,
            model.tensors,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0),
            comm=comm,
        )
        count, place = trainer.sampler_position
        mine = {name: tensor[place::count] for name, tensor in model.batch.items()}
        return (count, place), trainer.step(mine, local=True).loss, trainer.step(model.batch).loss

    found = rt.run_threads(pipeline.mesh, run)
    expected = [(2, 0), (2, 1)] * 2 if sizes == (2, 2) else [(1, 0)] * 3
    assert [position for position, *_ in found] == expected
    for _, local, everything in found:
        torch.testing.assert_close(local, everything, rtol=1e-12, atol=0)


def _of(graph: Graph, key: str, items: tuple[str, ...]) -> bool:
    """Whether an operator belongs to some items."""
    return any((f.prefix or f.node.key) in items for f in graph.flat() if f.key == key)
