"""Ranks that hold different values are found before they train."""

import pytest
import torch
from torch import Tensor

from parloom import runtime as rt
from parloom.errors import InputError, LaunchError
from parloom.runtime.same import check_same_batch
from tests.dist import mlp

MESH = rt.grid({"x": 2, "y": 2})
NAN = float("nan")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(7, 5, generator=generator).t(),
        "half": torch.randn(6, generator=generator).bfloat16(),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "phase": torch.tensor([1 + 2j, 3 - 1j]),
        "empty": torch.ones(0, 3),
        "holes": torch.tensor([1.0, NAN, float("inf"), -float("inf")]),
        "huge": torch.tensor([1e300, -1e300, 1e308, 1e308], dtype=torch.float64),
    }


def check(changed: dict[str, Tensor]) -> None:
    """Rank 2 has `changed`, the others have what all should have."""

    def body(comm: rt.Comm) -> None:
        mine = {**tensors(), **(changed if comm.rank == 2 else {})}
        rt.check_same_values(comm, mine.items())

    rt.run_threads(MESH, body)


def test_equal_values_pass() -> None:
    check({})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", torch.randn(5, 7, generator=torch.Generator().manual_seed(1))),
        ("weight", -tensors()["weight"]),
        ("half", tensors()["half"] * 1.01),
        ("count", torch.tensor(4)),
        ("mask", torch.tensor([True, True])),
        ("phase", torch.tensor([1 + 2j, 3 + 1j])),
        ("holes", torch.tensor([1.0, 0.0, float("inf"), -float("inf")])),
        ("holes", torch.tensor([NAN, NAN, float("inf"), -float("inf")])),
    ],
)
def test_the_tensor_that_differs_is_named(name: str, value: Tensor) -> None:
    with pytest.raises(LaunchError, match=f"^{name} differs"):
        check({name: value})


def test_the_first_of_many_is_named() -> None:
    with pytest.raises(LaunchError, match=r"^half and 1 more tensor differ"):
        check({"count": torch.tensor(4), "half": torch.zeros(6)})


def test_rounding_of_another_order_of_summation_passes() -> None:
    """Ranks may sum with other numbers of threads or vector widths."""
    value = tensors()["weight"].double()
    check({"weight": value * (1 + 1e-15)})


def test_one_rank_reads_nothing() -> None:
    comm = rt.SingleComm(rt.grid({"x": 1}))
    rt.check_same_values(comm, iter([("weight", torch.ones(2))]))


# Batches.


def step_with(seeds: tuple[int, int, int, int], local: bool = False) -> None:
    """One step of ranks whose batches (rows x over 2, each shared by 2 ranks) have these seeds."""
    made = mlp.program(MESH, mlp.Layout(("x",), ("y",)))

    def body(comm: rt.Comm) -> None:
        one = rt.Trainer(made, mlp.model().state_dict(), optimizer=mlp.sgd, comm=comm)
        batch = mlp.batch(seed=seeds[comm.rank])
        if local:
            count, index = one.sampler_position
            batch = {name: tensor.chunk(count)[index] for name, tensor in batch.items()}
        one.step(batch, local=local)

    rt.run_threads(MESH, body)


def test_global_batches_must_be_the_same_everywhere() -> None:
    step_with((3, 3, 3, 3))
    with pytest.raises(InputError, match=r"^input 'x' differs between ranks 0 and 2; .*shuffle"):
        step_with((3, 3, 4, 3))


def test_local_batches_must_be_the_same_where_samples_are_shared() -> None:
    step_with((3, 3, 4, 4), local=True)
    with pytest.raises(InputError, match=r"^input 'x' differs between ranks 2 and 3, .*sampler"):
        step_with((3, 3, 3, 4), local=True)


def test_batches_are_compared_by_place_of_every_element() -> None:
    """Unlike weights: the same samples in another order are another batch of labels."""
    rows = torch.arange(6, dtype=torch.bfloat16)

    def body(comm: rt.Comm) -> None:
        batch = {"rows": rows.flip(0) if comm.rank == 1 else rows, "one": torch.tensor(True)}
        check_same_batch(comm, ("rows", "one"), batch, {}, torch.device("cpu"))

    with pytest.raises(InputError, match=r"^input 'rows' differs between ranks 0 and 1"):
        rt.run_threads(MESH, body)


def test_batches_are_compared_once() -> None:
    """A collective and a copy to the host: not in every step."""
    made = mlp.program(MESH, mlp.Layout(("x",)))

    def losses(comm: rt.Comm) -> list[float]:
        one = rt.Trainer(made, mlp.model().state_dict(), optimizer=mlp.sgd, comm=comm)
        steps = (one.step(mlp.batch()), one.step(mlp.batch(seed=comm.rank)))
        return [float(step.loss) for step in steps]

    found = rt.run_threads(MESH, losses)
    assert all(len(steps) == 2 and steps[0] == found[0][0] for steps in found)
