"""The judge of the proof: it must see every kind of difference, on every rank."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parloom import api
from parloom.errors import InputError, LaunchError
from parloom.execute import prove
from parloom.execute.ranks import RankError
from parloom.execute.verify import Pieces, RankTrace, Trace, assemble, compare, require_finite
from parloom.ir.expected import Prediction

WEIGHT = torch.arange(8, dtype=torch.float64).reshape(2, 4) + 1


def rank(loss: float = 1.0, gradient: Tensor = WEIGHT, state: Tensor = WEIGHT) -> RankTrace:
    """What a rank that holds the whole weight sends home."""
    losses = [torch.tensor(loss, dtype=torch.float64)] * 3
    gradients: Pieces = {"w": ((2, 4), [((0, 0), gradient)])}
    states: Pieces = {"w": ((2, 4), [((0, 0), state)])}
    return losses, gradients, states


def reference() -> Trace:
    losses = tuple(torch.tensor(1.0, dtype=torch.float64) for _ in range(3))
    return Trace(losses, {"w": WEIGHT}, {"w": WEIGHT})


def test_equal_ranks_pass() -> None:
    report = compare(reference(), assemble([rank(), rank()]), 2)
    assert report.passed
    assert report.worst_error == 0


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (rank(gradient=WEIGHT * 100), "gradient of w"),
        (rank(state=WEIGHT + 1e-6), "w after 3 steps"),
        (rank(loss=1.1), "loss of step 1"),
    ],
)
def test_a_replica_that_differs_fails(second: RankTrace, named: str) -> None:
    """Rank 0 is right; only the other rank is not."""
    report = compare(reference(), assemble([rank(), second]), 2)
    assert not report.passed
    assert report.first_difference is not None
    assert named in report.first_difference


def test_the_cause_is_named_before_its_consequence() -> None:
    """A wrong gradient in step 1 comes before the losses and weights that follow from it."""
    wrong = rank(gradient=WEIGHT * 2, state=WEIGHT * 3)
    report = compare(reference(), assemble([wrong, wrong]), 2)
    assert report.first_difference is not None
    assert report.first_difference.startswith("gradient of w")


def test_infinities_at_equal_places_are_equal() -> None:
    """As in a buffer that masks what attention may not see."""
    mask = torch.tensor([[0.0, -torch.inf, 1, 2], [3, 4, 5, 6]], dtype=torch.float64)
    expected = Trace(reference().losses, {"w": WEIGHT}, {"w": mask})
    assert compare(expected, assemble([rank(state=mask)] * 2), 2).passed
    other = rank(state=mask.flip(1))
    assert not compare(expected, assemble([other, other]), 2).passed


@pytest.mark.parametrize(
    ("loss", "gradient", "named"),
    [
        (torch.nan, WEIGHT, "own loss of step 1 is NaN on one device"),
        (torch.inf, WEIGHT, "own loss of step 1 is infinite"),
        (1.0, WEIGHT * torch.nan, "own gradient of w is NaN"),
    ],
)
def test_a_model_that_makes_nan_by_itself_is_no_failed_proof(
    loss: float, gradient: Tensor, named: str
) -> None:
    losses = tuple(torch.tensor(loss, dtype=torch.float64) for _ in range(3))
    with pytest.raises(InputError, match=named):
        require_finite(Trace(losses, {"w": gradient}, {"w": WEIGHT}))
    require_finite(reference())


def test_a_missing_piece_fails() -> None:
    losses, _, state = rank()
    half: Pieces = {"w": ((2, 4), [((0, 0), WEIGHT[:1])])}
    report = compare(reference(), assemble([(losses, half, state)]), 1)
    assert not report.passed


@pytest.mark.slow
def test_long_proofs_tell_where_they_are_and_why_they_died(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = api.plan("zoo:mlp", cluster="2xcpu", devices=2, batch=4, method="data_parallel")
    said: list[str] = []
    assert api.verify(plan, progress=said.append).passed
    told = [re.sub(r"\d+\.\d s", "N s", x) for x in said if not x.endswith("ranks are done")]
    assert told == [
        "building zoo:mlp", "capturing it", "captured in N s: it is the planned one",
        "comparing it with the module itself", "compared in N s",
        "training 3 steps on 2 ranks",
        *(f"training step {i} of 3 on one device, to compare with" for i in (1, 2, 3)),
    ]  # fmt: skip

    big = replace(plan, prediction=Prediction(1.0, 2**60))
    api.verify(big, progress=said.append)
    assert any(line.startswith("2 ranks in float64 may need 4096 PiB on") for line in said)

    def dies(*_: object, **__: object) -> None:
        raise RankError(1, 2, "it ended without a result (signal SIGKILL)", "", killed=True)

    monkeypatch.setattr(prove, "verify", dies)
    with pytest.raises(LaunchError, match=r"SIGKILL\): most likely memory ran out, .* --shrink$"):
        api.verify(plan)
