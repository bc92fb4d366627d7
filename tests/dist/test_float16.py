"""Models captured in float16 train as in plain PyTorch: autocast's losses, GradScaler's steps."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from parloom import runtime as rt
from parloom.capture import capture, parameters_of, program
from parloom.capture.load import cast_batch, cast_model
from parloom.comparators.baselines import METHODS, random_plan
from parloom.cost.clusters import resolve_cluster
from parloom.execute.program import compile_pcg, compile_stages
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import grid
from parloom.ir.plan import Decisions, one_stage
from parloom.runtime.spans import Spans
from parloom.runtime.step import Gradients
from tests.dist.grad_scaler import DECAY, Batches, Run, by_torch, check, train
from tests.dist.staged import drawn, even
from tests.zoo_sizes import small

Model = tuple[nn.Module, dict[str, Tensor]]
sgd = partial(torch.optim.SGD, lr=0.1)
LOW = {"master_dtype": "float32", "reduce_dtype": "float32"}


def half(name: str) -> Model:
    model, batch = small(name)
    cast_model(model, torch.float16)
    return model, cast_batch(batch, torch.float16)


@cache
def captured(name: str) -> Graph:
    return capture(*half(name))


def decisions(graph: Graph, method: str) -> Decisions:
    if method.startswith("random"):
        found = random_plan(graph, factorize(graph), grid({"x": 2, "y": 2}), int(method[6:]))
    else:
        found = next(iter(METHODS[method](graph, resolve_cluster("4xcpu").cluster, 1, 0)))
    return replace(found, **LOW)  # type: ignore[arg-type]


def parallel(
    graph: Graph,
    chosen: Decisions,
    model: nn.Module,
    batches: Batches,
    scale: rt.LossScale | None = None,
) -> list[Run]:
    """Train on ranks that are threads."""
    made: rt.Program | rt.Pipeline
    if len(chosen.stages) > 1:
        made = compile_stages(lower_stages(graph, chosen), chosen, "test").pipeline
    else:
        made = compile_pcg(lower(graph, chosen, factored=factorize(graph)), "test").program
    tensors = parameters_of(model, graph)

    def body(comm: rt.Comm) -> Run:
        one = rt.Trainer(
            made,
            tensors,
            optimizer=sgd,
            comm=comm,
            clip_norm=1.0,
            scheduler=lambda o: StepLR(o, 1, DECAY),
            loss_scale=replace(scale) if scale else None,
        )
        return train(one, batches)

    return rt.run_threads(made.mesh, body)


@cache
def expected(name: str) -> Run:
    model, batch = half(name)
    with torch.autocast("cpu", dtype=torch.float16):
        return by_torch(model, [batch] * 4, sgd, rt.LossScale(), 1.0)


@pytest.mark.sample(7)
@pytest.mark.parametrize("method", ["data_parallel", "fsdp", "megatron", "random0", "random1"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "llama", "dlrm"])
def test_captured_models_train_as_in_plain_torch(name: str, method: str) -> None:
    """With GradScaler's first scale, under which llama's gradients overflow."""
    graph = captured(name)
    assert expected(name).skipped[0] == (name == "llama")
    model, batch = half(name)
    for run in parallel(graph, decisions(graph, method), model, [batch] * 4):
        check(run, expected(name))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_all_stages_skip_the_same_steps(name: str, schedule: str) -> None:
    """Whichever stage has the gradients that overflow."""
    graph = captured(name)
    plan = drawn(graph, even(graph, 3), [1, 2, 1], schedule=schedule, num_microbatches=2, seed=1)
    model, batch = half(name)
    runs = parallel(graph, replace(plan, **LOW), model, [batch] * 4)  # type: ignore[arg-type]
    assert len(runs) == 4
    for run in runs:
        check(run, expected(name))


def test_ranks_that_do_not_agree_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: not all stages have gradients that overflow."""
    agree = Gradients.agree

    def alone(self: Gradients, *, with_norm: bool, spans: Spans | None) -> None:
        own = self._sums[1].clone()
        agree(self, with_norm=with_norm, spans=spans)
        self._sums[1] = own

    monkeypatch.setattr(Gradients, "agree", alone)
    graph = captured("llama")
    plan = replace(drawn(graph, even(graph, 3), [1, 1, 1], seed=1), **LOW)  # type: ignore[arg-type]
    model, batch = half("llama")
    skipped = [run.skipped[0] for run in parallel(graph, plan, model, [batch])]
    assert sorted(set(skipped)) == [False, True]


def test_buffers_move_where_the_step_is_skipped() -> None:
    """As in torch: forward has written batch norm's statistics before anybody knows."""
    graph = captured("cnn")
    model, batch = half("cnn")
    whole, _ = half("cnn")
    scale = rt.LossScale(scale=2.0**40)
    with torch.autocast("cpu", dtype=torch.float16):
        one = by_torch(whole, [batch], sgd, scale)
    assert one.skipped == [True]
    before = {name: value.float() for name, value in model.state_dict().items()}
    (name,) = [n for n in before if n.endswith("running_mean")][:1]
    assert not torch.allclose(one.state[name], before[name], atol=1e-3)
    for run in parallel(graph, decisions(graph, "data_parallel"), model, [batch], scale):
        check(replace(run, norms=[]), one)


# Ranges.


class Head(nn.Module):
    """A linear layer and a loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.linear(x), y)


def halves(*sizes: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(*sizes, generator=generator).half() for name in "xy"}


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda h, y: F.cross_entropy(h, y.argmax(1)),
    "soft_targets": lambda h, y: F.cross_entropy(h, y, label_smoothing=0.1),
    "nll": lambda h, y: F.nll_loss(h.log_softmax(1), y.argmax(1), reduction="sum"),
    "mse": F.mse_loss,
    "mse_sum": lambda h, y: F.mse_loss(h, y, reduction="sum"),
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": lambda h, y: F.binary_cross_entropy(h.sigmoid(), y),
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "kl_div": lambda h, y: F.kl_div(h.log_softmax(1), y, reduction="batchmean"),
    "poisson": F.poisson_nll_loss,
    "by_hand": lambda h, y: (h - y).square().mean(),
    "sum_by_hand": lambda h, y: (h - y).abs().sum(),
    "by_rows": lambda h, y: F.mse_loss(h, y, reduction="none").sum(1).mean(0),
    "of_two": lambda h, y: F.mse_loss(h, y) + h.square().mean() * 0.1,
    "weighted": lambda h, y: F.mse_loss(h, y, reduction="none").mul(y).sum() / y.numel(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_float32(name: str) -> None:
    """As torch.autocast has them, and of the value that a float32 model has."""
    model, batch = Head(LOSSES[name]).half(), halves(8, 8)
    graph = capture(model, batch)
    assert graph.loss is not None
    assert graph.main.specs()[graph.loss].dtype == "float32"
    wide = {n: t.float() for n, t in batch.items()}
    loss = Head(LOSSES[name])
    loss.load_state_dict({n: t.float() for n, t in model.state_dict().items()})
    one = loss(**wide).item()
    scale = rt.LossScale(scale=2.0**10)  # under 2.0**16 gradients of sums overflow
    chosen = replace(Decisions(one_stage(grid({"x": 1}))), **LOW)  # type: ignore[arg-type]
    (run,) = parallel(graph, chosen, model, [batch], scale)
    assert run.losses == pytest.approx([one], rel=4e-3)
    assert run.skipped == [False]


def test_without_wide_losses_the_first_step_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a float16 loss is the scale itself, and 65536 is above 65504."""
    model, batch = Head(F.mse_loss).half(), halves(8, 8)
    chosen = replace(Decisions(one_stage(grid({"x": 1}))), **LOW)  # type: ignore[arg-type]
    (run,) = parallel(capture(model, batch), chosen, model, [batch])
    assert run.skipped == [False]
    monkeypatch.setattr(program, "widen_losses", lambda module: None)
    (run,) = parallel(capture(model, batch), chosen, model, [batch])
    assert run.skipped == [True]


def test_other_dtypes_keep_the_dtype_of_their_loss() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        batch = {n: t.to(dtype) for n, t in halves(8, 8).items()}
        graph = capture(Head(F.mse_loss).to(dtype), batch)
        assert graph.loss is not None
        assert f"torch.{graph.main.specs()[graph.loss].dtype}" == str(dtype)
        assert not any(item.op == "_to_copy" for item in graph.main.body)  # type: ignore[union-attr]


def test_large_differences_do_not_overflow_a_loss() -> None:
    """The square of 300 is above 65504."""
    model, batch = Head(F.mse_loss).half(), halves(8, 8)
    batch["y"] += 300
    graph = capture(model, batch)
    for method in ("data_parallel", "random0"):
        scale = rt.LossScale(scale=2.0**8)
        for run in parallel(graph, decisions(graph, method), model, [batch], scale):
            assert run.losses == [pytest.approx(9e4, rel=0.01)]
            assert run.skipped == [False]


class Centred(nn.Module):
    """A mean over samples whose sum is above 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x) + 100
        return (h.mean(0) - 99).square().mean()


@pytest.mark.parametrize("method", ["data_parallel", "fsdp"])
def test_the_sum_of_a_mean_does_not_overflow(method: str) -> None:
    """What a rank adds up of a mean over all samples is a sum in float32."""
    model, batch = Centred().half(), {"x": halves(8192, 8)["x"]}
    graph = capture(model, batch)
    one = model(**batch).item()
    for run in parallel(graph, decisions(graph, method), model, [batch]):
        assert run.losses == [pytest.approx(one, rel=0.1)]


def test_a_program_in_float32_scales_nothing() -> None:
    model, batch = small("mlp")
    graph = capture(model, batch)
    made = compile_pcg(lower(graph, decisions_of_32(graph)), "test").program
    assert not made.scales_loss


def decisions_of_32(graph: Graph) -> Decisions:
    return next(iter(METHODS["data_parallel"](graph, resolve_cluster("2xcpu").cluster, 1, 0)))


def test_autocast_inside_of_a_float32_model_is_scaled_too() -> None:
    """Gradients of what autocast computes in float16 underflow all the same."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                return F.mse_loss(self.linear(x), y)

    batch: dict[str, Any] = {n: t.float() for n, t in halves(8, 8).items()}
    graph = capture(Cast(), batch)
    made = compile_pcg(lower(graph, decisions_of_32(graph)), "test").program
    assert made.scales_loss


class Fed(nn.Module):
    """A float32 model that is fed halves, with a table and a frozen layer in float16."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).half().requires_grad_(False)
        self.register_buffer("scale", torch.rand(8).half())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.linear(self.frozen(x).float()) * self.scale.float(), y.float())


def test_halves_that_have_no_gradient_scale_nothing() -> None:
    """As in eager PyTorch, a step whose gradients are not finite is taken."""
    batch = halves(8, 8)
    graph = capture(Fed(), batch)
    made = compile_pcg(lower(graph, decisions_of_32(graph)), "test").program
    assert not made.scales_loss
    batch["x"][0, 0] = float("nan")
    tensors = parameters_of(Fed(), graph)

    def body(comm: rt.Comm) -> tuple[rt.StepResult, dict[str, Tensor]]:
        one = rt.Trainer(made, tensors, optimizer=sgd, comm=comm)
        return one.step(batch), one.state_dict()

    for result, state in rt.run_threads(made.mesh, body):
        assert (result.skipped, result.loss_scale) == (False, None)
        assert state["linear.weight"].isnan().all()


def test_halves_of_which_one_has_a_gradient_scale_the_loss() -> None:
    class Last(Fed):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.frozen(self.linear(x.float()).half()).float(), y.float())

    graph = capture(Last(), halves(8, 8))
    assert compile_pcg(lower(graph, decisions_of_32(graph)), "test").program.scales_loss


def test_complex_gradients_are_unscaled() -> None:
    """Both of their parts; one that is not finite is found."""
    scale, device = rt.LossScale(scale=4.0), torch.device("cpu")
    gradients = [torch.tensor([4 + 8j, 2j]), torch.tensor([1.0, 2.0])]
    assert not scale.unscale(gradients, device)
    assert gradients[0].tolist() == [1 + 2j, 0.5j]
    assert gradients[1].tolist() == [0.25, 0.5]
    assert scale.unscale([torch.tensor([complex(0, float("inf"))])], device)
