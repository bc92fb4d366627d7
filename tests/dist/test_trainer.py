"""The trainer: optimizers, precision, batches, evaluation, state in and out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parloom import runtime as rt
from parloom.errors import InputError, VerifyError
from tests.dist import mlp

GRID = rt.grid({"x": 2, "y": 2})
STORAGES = ["replicated", "zero1", "zero2", "zero3"]


def trainer(comm: rt.Comm, made: rt.Program, **options: Any) -> rt.Trainer:
    chosen = {"optimizer": mlp.adamw, "evaluation": made, **options}
    return rt.Trainer(made, mlp.model().state_dict(), comm=comm, **chosen)


def layout(storage: str) -> mlp.Layout:
    return mlp.Layout(("x", "y"), storage=storage)


def on_ranks(made: rt.Program, body: Callable[[rt.Trainer], Any], **options: Any) -> list[Any]:
    return rt.run_threads(made.mesh, lambda comm: body(trainer(comm, made, **options)))


# Equality with one device beyond what test_training covers.


@pytest.mark.parametrize("storage", STORAGES)
def test_sgd_with_momentum_and_three_microbatches(storage: str) -> None:
    mesh = mlp.with_time(rt.grid({"x": 2}), 3)
    made = mlp.program(mesh, mlp.Layout(("x",), storage=storage))
    expected = mlp.single_device(mlp.sgd, steps=4)
    for run in rt.run_threads(mesh, lambda comm: mlp.parallel(comm, made, mlp.sgd, steps=4)):
        assert mlp.difference(run, expected) < 1e-9


@pytest.mark.parametrize("storage", STORAGES)
def test_a_partial_loss_is_reduced_by_the_step(storage: str) -> None:
    mesh = mlp.with_time(GRID, 2)
    made = mlp.program(mesh, mlp.Layout(("y",), ("x",), storage, late_loss=True))
    expected = mlp.single_device(mlp.adamw)

    def body(comm: rt.Comm) -> tuple[mlp.Run, float]:
        return mlp.parallel(comm, made, mlp.adamw), trainer(comm, made).evaluate(
            mlp.batch(seed=0)
        ).loss.item()

    for run, evaluated in rt.run_threads(mesh, body):
        assert mlp.difference(run, expected) < 1e-9
        assert abs(evaluated - expected.losses[0]) < 1e-9


def test_all_forwards_before_all_backwards() -> None:
    mesh = mlp.with_time(GRID, 2)
    actions = ("F0", "F1", "B1", "B0", "REDUCE", "STEP", "GATHER")
    made = mlp.program(mesh, layout("zero3"), actions=actions)
    expected = mlp.single_device(mlp.sgd)
    for run in rt.run_threads(mesh, lambda comm: mlp.parallel(comm, made, mlp.sgd)):
        assert mlp.difference(run, expected) < 1e-9


def test_one_rank_is_the_single_device() -> None:
    mesh = rt.grid({"x": 1})
    made = mlp.program(mesh, mlp.Layout(("x",), storage="zero3"))
    run = mlp.parallel(rt.SingleComm(mesh), made, mlp.adamw, clip_norm=0.5)
    assert mlp.difference(run, mlp.single_device(mlp.adamw, clip_norm=0.5)) < 1e-12


@pytest.mark.parametrize("storage", STORAGES)
def test_parameters_without_gradient_are_left_alone(storage: str) -> None:
    def body(one: rt.Trainer) -> None:
        one.step(mlp.batch())
        helds = one.parts[0].store.helds
        assert helds["unused"].owned.grad is None
        assert helds["frozen"].owned.grad is None
        assert helds["gain"].owned.grad is not None
        assert helds["unused"].owned not in one.optimizer.state

    on_ranks(mlp.program(GRID, layout(storage)), body)


@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
@pytest.mark.parametrize("storage", STORAGES)
def test_bf16_weights_with_fp32_masters(storage: str, reduce_dtype: str | None) -> None:
    mesh = mlp.with_time(rt.grid({"x": 2}), 2)
    made = mlp.program(mesh, mlp.Layout(("x",), storage=storage), "bfloat16")
    masters = tuple(replace(spec, master_dtype="float32") for spec in made.parameters)
    made = replace(made, parameters=masters, reduce_dtype=reduce_dtype)

    def body(one: rt.Trainer) -> dict[str, Tensor]:
        for step in range(3):
            one.step(mlp.batch(torch.bfloat16, seed=step))
        for held in one.parts[0].store.helds.values():
            if held.spec.trainable:
                assert held.owned.dtype == torch.float32
                assert torch.equal(held.stored, held.owned.detach().bfloat16())
        return one.state_dict()

    # SGD: Adam would turn rounding of small gradients into whole steps.
    expected = mlp.single_device(mlp.sgd).weights
    for state in on_ranks(made, body, optimizer=mlp.sgd):
        for name, value in state.items():
            assert value.dtype == torch.bfloat16
            assert torch.allclose(value.double(), expected[name], atol=0.03), name


# What is refused.


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon])
def test_optimizers_that_need_whole_tensors(kind: type[torch.optim.Optimizer]) -> None:
    made = mlp.program(rt.grid({"x": 1}), mlp.Layout())

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        matrices = [p for _, p in named if p.dim() == 2]
        return kind(matrices)  # type: ignore[call-arg]

    with pytest.raises(InputError, match=f"{kind.__name__} cannot update shards"):
        trainer(rt.SingleComm(made.mesh), made, optimizer=optimizer)


def test_batches_that_do_not_fit() -> None:
    made = mlp.program(rt.grid({"x": 1}), mlp.Layout())
    one = trainer(rt.SingleComm(made.mesh), made)
    good = mlp.batch()
    with pytest.raises(InputError, match=r"batch has \['x'\], the program takes \['x', 'y'\]"):
        one.step({"x": good["x"]})
    smaller = r"input 'x' is float64\[23, 6\]; .* float64\[24, 6\]; .*drop_last=True.* --batch"
    with pytest.raises(InputError, match=smaller):
        one.step({**good, "x": good["x"][1:]})
    with pytest.raises(InputError, match=r"float64\[24, 5\]; .* float64\[24, 6\]; plan again"):
        one.step({**good, "x": good["x"][:, 1:]})
    with pytest.raises(InputError, match=r"input 'y' is float32.*cast it: \.to\(torch\.float64\)"):
        one.step({**good, "y": good["y"].float()})
    with pytest.raises(InputError, match=r"batch is a list; pass a dict .*\['x', 'y'\]"):
        one.step([good["x"], good["y"]])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="input 'y' is a list, not a tensor"):
        one.step({**good, "y": good["y"].tolist()})  # type: ignore[dict-item]


def test_tensors_that_are_missing_or_of_another_shape() -> None:
    made = mlp.program(rt.grid({"x": 1}), mlp.Layout())
    one = trainer(rt.SingleComm(made.mesh), made)
    state = one.state_dict()
    with pytest.raises(InputError, match=r"no tensor named up\.bias"):
        one.load_state_dict({k: v for k, v in state.items() if k != "up.bias"})
    with pytest.raises(InputError, match=r"gain has shape \(7,\), the plan was made for \(6,\)"):
        one.load_state_dict({**state, "gain": torch.ones(7)})


def test_evaluation_needs_a_program() -> None:
    made = mlp.program(rt.grid({"x": 1}), mlp.Layout())
    one = trainer(rt.SingleComm(made.mesh), made, evaluation=None)
    with pytest.raises(InputError, match="without an evaluation program"):
        one.evaluate(mlp.batch())


def test_a_gradient_that_stays_away_is_noticed() -> None:
    """Buckets are built from the first step; a program must not change after it."""
    mesh = rt.grid({"x": 2})
    made = mlp.program(mesh, mlp.Layout(("x",)))
    forward = made.forward

    def fickle(ctx: rt.Context, batch: dict[str, Tensor], hoisted: Any) -> rt.Result:
        result = forward(ctx, batch, hoisted)
        return result if ctx.step == 0 else rt.Result(ctx.weight("gain").sum())

    def body(one: rt.Trainer) -> None:
        one.step(mlp.batch())
        one.step(mlp.batch())

    with pytest.raises(VerifyError, match="a gradient did not arrive that did before"):
        on_ranks(replace(made, forward=fickle), body)


# Batches and evaluation.


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_local_batch_is_the_ranks_own_shard(microbatches: int) -> None:
    mesh = mlp.with_time(GRID, microbatches)
    made = mlp.program(mesh, mlp.Layout(("x",), ("y",)))
    whole = mlp.batch(seed=0)

    def body(one: rt.Trainer) -> tuple[float, float, tuple[int, int]]:
        replicas, index = one.sampler_position
        local = {name: t.chunk(replicas)[index] for name, t in whole.items()}
        return (
            one.step(local, local=True).loss.item(),
            one.step(whole).loss.item(),
            (replicas, index),
        )

    results = on_ranks(made, body)
    expected = mlp.single_device(mlp.adamw, steps=1).losses[0]
    assert [position for _, _, position in results] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    assert all(abs(loss - expected) < 1e-9 for loss, _, _ in results)
    assert results[0][1] < expected


@pytest.mark.parametrize("storage", ["replicated", "zero3"])
def test_evaluation_gives_full_outputs(storage: str) -> None:
    mesh = mlp.with_time(GRID, 2)
    made = mlp.program(mesh, mlp.Layout(("y",), ("x",), storage))
    whole, data = mlp.model(), mlp.batch()
    predicted = whole.down(torch.relu(whole.up(data["x"] * whole.gain)) * whole.frozen)

    def body(one: rt.Trainer) -> rt.Evaluation:
        before = one.evaluate(data)
        one.step(data)
        after = one.evaluate(data)
        assert after.loss < before.loss
        return before

    for evaluation in on_ranks(made, body):
        assert torch.allclose(evaluation.outputs["predicted"], predicted)
        assert torch.allclose(evaluation.loss, whole(**data))
        assert not evaluation.loss.requires_grad


def test_prologue_values_are_summed_over_microbatches() -> None:
    mesh = mlp.with_time(rt.grid({"x": 2}), 3)
    made = mlp.program(mesh, mlp.Layout(("x",)))
    seen: list[float] = []
    forward = made.forward

    def prologue(ctx: rt.Context, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (rt.reduce(batch["x"].sum(), ctx, ("x",)),)

    def checked(ctx: rt.Context, batch: dict[str, Tensor], hoisted: Any) -> rt.Result:
        seen.append(hoisted[0].item())
        return forward(ctx, batch, hoisted)

    on_ranks(replace(made, forward=checked, prologue=prologue), lambda one: one.step(mlp.batch()))
    assert len(seen) == 6
    assert all(abs(value - mlp.batch()["x"].sum().item()) < 1e-9 for value in seen)


@pytest.mark.parametrize("in_turn", [True, False])
def test_buffers_are_written_back_once_a_step(in_turn: bool) -> None:
    """Every microbatch reads the buffers of the start of the step, as one pass would."""
    mesh = mlp.with_time(rt.grid({"x": 2}), 2)
    passes = ("F0", "B0", "F1", "B1") if in_turn else ("F0", "F1", "B1", "B0")
    actions = (*passes, "REDUCE", "STEP", "GATHER")
    made = mlp.program(mesh, mlp.Layout(("x",), recompute=True), actions=actions)
    forward = made.forward
    spec = rt.TensorSpec("count", (2,), "float64", (("x",),))

    def counting(ctx: rt.Context, batch: dict[str, Tensor], hoisted: Any) -> rt.Result:
        result = forward(ctx, batch, hoisted)
        return replace(result, updates={"count": ctx.buffer("count") + 1 + ctx.coordinates["x"]})

    made = replace(made, forward=counting, buffers=(spec,))
    state = {**mlp.model().state_dict(), "count": torch.tensor([10.0, 20.0], dtype=torch.float64)}

    def body(comm: rt.Comm) -> list[list[float]]:
        one = rt.Trainer(made, state, optimizer=mlp.sgd, comm=comm)
        counts: list[list[float]] = []
        for _ in range(2):
            one.step(mlp.batch())
            counts.append(one.state_dict()["count"].tolist())
        return counts

    assert rt.run_threads(mesh, body) == [[[11.0, 22.0], [12.0, 24.0]]] * 2


# State in and out.


def test_state_dict_round_trip_with_alias_and_padding() -> None:
    mesh = rt.grid({"x": 2})
    made = mlp.program(mesh, mlp.Layout(("x",), storage="zero3"))

    def changed(spec: rt.ParameterSpec) -> rt.ParameterSpec:
        if spec.name == "unused":  # the user has three elements, the program four
            return replace(spec, shape=(4,), dims=((4,),), valid=(3,), aliases=("also",))
        return spec

    made = replace(made, parameters=tuple(changed(spec) for spec in made.parameters))
    state = {**mlp.model().state_dict(), "unused": torch.arange(3.0, dtype=torch.float64)}

    def body(comm: rt.Comm) -> None:
        one = rt.Trainer(made, state, optimizer=mlp.sgd, comm=comm)
        out = one.state_dict()
        assert set(out) == {*state, "also"}
        assert out["also"] is out["unused"]
        assert all(torch.equal(out[name], state[name]) for name in state)
        alias = {("also" if k == "unused" else k): v + 1 for k, v in state.items()}
        one.load_state_dict(alias)
        assert torch.equal(one.state_dict()["unused"], state["unused"] + 1)
        assert all(box.sizes != (0,) for shard in one.shards() for box in shard.boxes)
        unused = next(shard for shard in one.shards() if shard.name == "unused")
        assert unused.global_shape == (3,)

    rt.run_threads(mesh, body)


def saved(made: rt.Program, steps: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train, then put together what a checkpoint would hold: full tensors from primary boxes."""

    def body(one: rt.Trainer) -> tuple[list[rt.Shard], dict[str, Any]]:
        for step in range(steps):
            one.step(mlp.batch(seed=step))
        return list(one.shards()), one.extra_state()

    full: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    results = on_ranks(made, body, scheduler=halving)
    for shards, extra in results:
        assert extra == results[0][1]
        for shard in shards:
            target = full.setdefault(
                shard.name, torch.zeros(shard.global_shape, dtype=torch.float64)
            )
            for box in shard.boxes if shard.primary else ():
                where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                target[where] = shard.tensor[box.local]
                counts[shard.name] = counts.get(shard.name, 0) + target[where].numel()
    assert counts == {name: tensor.numel() for name, tensor in full.items()}
    return full, results[0][1]


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


@pytest.mark.parametrize("target", STORAGES)
@pytest.mark.parametrize("source", STORAGES)
def test_training_continues_under_another_plan(source: str, target: str) -> None:
    first = mlp.program(GRID, layout(source))
    small = rt.grid({"x": 2})
    second = mlp.program(small, mlp.Layout(("x",), storage=target))
    full, extra = saved(first, 2)
    straight, _ = saved(first, 4)
    assert "optimizer/exp_avg/up.weight" in full
    assert "optimizer/exp_avg/unused" not in full

    def body(one: rt.Trainer) -> dict[str, Tensor]:
        one.load_extra_state(extra)
        for shard in one.shards():
            for box in shard.boxes:
                where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                shard.tensor[box.local] = full[shard.name][where]
        one.refresh()
        assert one.steps_done == 2
        assert one.samples_seen == 2 * mlp.BATCH
        for step in (2, 3):
            one.step(mlp.batch(seed=step))
        return one.state_dict()

    for state in on_ranks(second, body, scheduler=halving):
        for name, value in state.items():
            assert torch.allclose(value, straight[name], rtol=0, atol=1e-9), name


# Schedules.


def plateau(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs"
    )


@pytest.mark.parametrize("storage", STORAGES)
def test_schedules_of_epochs_and_of_a_validation_loss_are_stepped_by_the_user(storage: str) -> None:
    """They are made from `trainer.optimizer`, and train as on one device."""
    made = mlp.program(GRID, layout(storage))
    validation, epochs, steps = mlp.batch(seed=9), 3, 2
    whole = mlp.model()
    single = mlp.adamw(list(whole.named_parameters()))
    by_epoch, by_loss = torch.optim.lr_scheduler.StepLR(single, 2, 0.1), plateau(single)
    for epoch in range(epochs):
        for step in range(steps):
            single.zero_grad()
            whole(**mlp.batch(seed=epoch * steps + step)).backward()
            single.step()
        with torch.no_grad():
            by_loss.step(whole(**validation).item())
        by_epoch.step()

    def body(one: rt.Trainer) -> tuple[float, dict[str, Tensor]]:
        by_epoch = torch.optim.lr_scheduler.StepLR(one.optimizer, 2, 0.1)
        by_loss = plateau(one.optimizer)
        for epoch in range(epochs):
            for step in range(steps):
                one.step(mlp.batch(seed=epoch * steps + step))
            by_loss.step(one.evaluate(validation).loss.item())
            by_epoch.step()
        return one.optimizer.param_groups[0]["lr"], one.state_dict()

    for rate, state in on_ranks(made, body):
        assert rate == single.param_groups[0]["lr"]
        for name, tensor in whole.state_dict().items():
            assert torch.allclose(state[name], tensor, rtol=1e-9, atol=1e-9), name


class ToldTheLoss:
    def step(self, loss: float, *rest: int) -> None:
        """Look at a loss."""


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (
            plateau,
            r"ReduceLROnPlateau\.step needs metrics.*ReduceLROnPlateau\(trainer\.optimizer\)",
        ),
        (lambda o: ToldTheLoss(), "ToldTheLoss.step needs loss"),
        (lambda o: None, "made a NoneType, which has no step"),
        (lambda o: o.param_groups, "made a list, which has no step"),
    ],
    ids=["plateau", "own", "nothing", "groups"],
)
def test_a_scheduler_that_no_step_can_drive_is_refused(
    scheduler: Callable[[torch.optim.Optimizer], Any], message: str
) -> None:
    made = mlp.program(rt.grid({}), mlp.Layout())
    with pytest.raises(InputError, match=message):
        trainer(rt.SingleComm(rt.grid({})), made, scheduler=scheduler)


# What users hand over by mistake.


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    made, whole = mlp.program(rt.grid({}), mlp.Layout()), mlp.model()
    comm = rt.SingleComm(rt.grid({}))
    for wrong in (
        lambda named: torch.optim.SGD(whole.parameters()),
        lambda named: torch.optim.SGD([*(p for _, p in named), next(whole.parameters())]),
    ):
        with pytest.raises(InputError, match=r"SGD was made with \d+ tensors that are not the tr"):
            trainer(comm, made, optimizer=wrong)
    some = trainer(comm, made, optimizer=lambda named: torch.optim.SGD([named[0][1]], lr=0.1))
    some.step(mlp.batch())


def test_a_batch_in_several_arguments_is_refused() -> None:
    made = mlp.program(rt.grid({}), mlp.Layout())
    one = trainer(rt.SingleComm(rt.grid({})), made)
    first, *others = mlp.batch().values()
    for call in (one.step, one.evaluate):
        with pytest.raises(InputError, match=r"local, is a Tensor.*pass one batch: a dict"):
            call(first, others[0])  # type: ignore[arg-type]
