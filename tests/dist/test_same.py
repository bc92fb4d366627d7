"""Ranks that hold different values are found before they train."""

import pytest
import torch
from torch import Tensor

from parloom import runtime as rt
from parloom.errors import LaunchError

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
