"""Ranks that train with different settings are told, before replicas drift apart for long."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR

from parloom import runtime as rt
from parloom.errors import InputError
from parloom.runtime.same_settings import check_same_settings
from tests.dist import mlp

MESH = rt.grid({"x": 2, "y": 2})
ODD = 2  # the rank that differs
LAYOUTS = {
    "data_parallel": mlp.Layout(("x", "y")),
    "zero1": mlp.Layout(("x", "y"), storage="zero1"),
    "fsdp": mlp.Layout(("x", "y"), storage="zero3"),
    "tensor": mlp.Layout(("x",), ("y",)),
}
Named = list[tuple[str, nn.Parameter]]
Chosen = Callable[[bool], dict[str, Any]]
Between = Callable[[rt.Trainer, bool], None]


def idle(trainer: rt.Trainer, odd: bool) -> None: ...


def run(
    layout: str, chosen: Chosen, between: Between = idle, steps: int = 2
) -> list[tuple[int, dict[str, Tensor]]]:
    """Arguments and what happens between steps, by whether this is the odd rank."""
    made = mlp.program(MESH, LAYOUTS[layout])

    def body(comm: rt.Comm) -> tuple[int, dict[str, Tensor]]:
        odd = comm.rank == ODD
        options: dict[str, Any] = {"optimizer": mlp.sgd, **chosen(odd)}
        trainer = rt.Trainer(made, mlp.model().state_dict(), comm=comm, evaluation=made, **options)
        for _ in range(steps):
            trainer.step(mlp.batch())
            between(trainer, odd)
        return trainer.steps_done, trainer.state_dict()

    return rt.run_threads(MESH, body)


def groups(kind: type[Optimizer] = SGD, **options: Any) -> Callable[[Named], Optimizer]:
    made: Any = kind
    return lambda named: made([p for _, p in named], **{"lr": 0.1, **options})


def without(left_out: str) -> Callable[[Named], Optimizer]:
    return lambda named: SGD([p for n, p in named if n != left_out], lr=0.1)


def schedule(gamma: float) -> Callable[[Optimizer], StepLR]:
    return lambda optimizer: StepLR(optimizer, 100, gamma)


VARIANTS: dict[str, tuple[Chosen, str]] = {
    "lr": (
        lambda odd: {"optimizer": groups(lr=0.2 if odd else 0.1)},
        r"lr of down\.bias differs between ranks 1 and 2: 0\.1 and 0\.2",
    ),
    "momentum": (
        lambda odd: {"optimizer": groups(momentum=0.5 if odd else 0.9)},
        r"momentum of .* differs between ranks 1 and 2: 0\.9 and 0\.5",
    ),
    "betas": (
        lambda odd: {"optimizer": groups(AdamW, betas=(0.9, 0.95 if odd else 0.999))},
        r"betas of .* differs between ranks 1 and 2: \[0\.9, 0\.999\] and \[0\.9, 0\.95\]",
    ),
    "membership": (
        lambda odd: {"optimizer": without("up.weight" if odd else "")},
        r"of up\.weight differs between ranks 1 and 2: .* and left out",
    ),
    "class": (
        lambda odd: {"optimizer": groups(AdamW if odd else SGD)},
        "differs between ranks 1 and 2",
    ),
    "gamma": (
        lambda odd: {"scheduler": schedule(0.5 if odd else 0.9)},
        r"the scheduler's gamma differs between ranks 1 and 2: 0\.9 and 0\.5",
    ),
    "scheduler": (
        lambda odd: {"scheduler": schedule(0.5) if odd else None},
        "the scheduler's .* differs between ranks 1 and 2: left out and|the scheduler's class",
    ),
    "clip": (
        lambda odd: {"clip_norm": 0.1 if odd else 1.0},
        r"clip_norm differs between ranks 1 and 2: 1\.0 and 0\.1",
    ),
    "no clip": (lambda odd: {"clip_norm": None if odd else 1.0}, r"clip_norm .*: 1\.0 and None"),
    "seed": (lambda odd: {"seed": int(odd)}, "seed differs between ranks 1 and 2: 0 and 1"),
    "exact": (
        lambda odd: {"exact_random": odd},
        "exact_random differs between ranks 1 and 2: False and True",
    ),
}


@pytest.mark.sample(22)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_that_differ(layout: str, variant: str) -> None:
    chosen, why = VARIANTS[variant]
    with pytest.raises(InputError, match=why):
        run(layout, chosen)
    run(layout, lambda odd: chosen(False))
    run(layout, lambda odd: chosen(True))


@pytest.mark.parametrize("after", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_change_between_steps(layout: str, after: int) -> None:
    def change(trainer: rt.Trainer, odd: bool) -> None:
        if odd and trainer.steps_done == after:
            trainer.optimizer.param_groups[0]["lr"] = 0.3

    with pytest.raises(InputError, match=r"lr of .* differs between ranks 1 and 2: 0\.1 and 0\.3"):
        run(layout, lambda odd: {}, change, steps=9)


def test_schedules_of_equal_ranks() -> None:
    def plateau(trainer: rt.Trainer, odd: bool) -> None:
        made = ReduceLROnPlateau(trainer.optimizer, patience=0)
        for _ in range(3):
            made.step(trainer.evaluate(mlp.batch()).loss.item())

    for layout in LAYOUTS:
        assert {done for done, _ in run(layout, lambda odd: {}, plateau, steps=5)} == {5}
        for make in (
            lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9),
            lambda optimizer: ExponentialLR(optimizer, 0.7),
        ):
            run(layout, lambda odd, make=make: {"scheduler": make}, steps=5)  # type: ignore[misc]


def test_objects_are_not_compared_by_address() -> None:
    class Own(StepLR):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "made by": object(), "names": {"b", "a"}}

    ends = run("fsdp", lambda odd: {"scheduler": lambda optimizer: Own(optimizer, 1)})
    assert [steps for steps, _ in ends] == [2] * len(ends)


@pytest.mark.parametrize("name", ["up.weight", "frozen", "down.bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_values_that_differ(layout: str, name: str) -> None:
    def load(trainer: rt.Trainer, odd: bool) -> None:
        state = trainer.state_dict()
        trainer.load_state_dict({**state, name: state[name] * (2 if odd else 1)})

    with pytest.raises(InputError, match=f"load_state_dict: {name} differs between ranks"):
        run(layout, lambda odd: {}, load)
    run(layout, lambda odd: {}, lambda trainer, odd: load(trainer, True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_progress_that_differs(layout: str) -> None:
    def load(trainer: rt.Trainer, odd: bool) -> None:
        if trainer.steps_done == 3:
            trainer.load_extra_state({**trainer.extra_state(), "step": 6 if odd else 5})

    with pytest.raises(InputError, match=r"number of steps done differs .* 5 and 6"):
        run(layout, lambda odd: {}, load, steps=4)


def test_the_first_pair_of_ranks_is_named() -> None:
    def body(comm: rt.Comm) -> None:
        check_same_settings(comm, {"a": "1", "b": str(comm.rank // 3)}, mlp.batch()["x"].device)

    with pytest.raises(InputError, match=r"^b differs between ranks 2 and 3: 0 and 1"):
        rt.run_threads(MESH, body)
