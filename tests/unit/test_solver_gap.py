"""How far the best estimate is from the bound of estimates."""

from dataclasses import dataclass
from math import inf

import pytest

from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.ir.expected import Status
from parloom.search.contexts import SimulatedPlan
from parloom.search.request import Request
from parloom.search.searched import Searched
from tests.property.searched import ADAM, PLENTY
from tests.property.test_climb import data_parallel
from tests.unit.test_simulate import model

CLUSTER = load_cluster("2x4xH100")


@dataclass(frozen=True, eq=False)
class Estimated(SimulatedPlan):
    """A plan with an estimate of one millisecond."""

    @property
    def estimate_ps(self) -> float:
        return 1e9


def searched(estimate_bound_ps: float, status: Status = Status.COMPLETE) -> Searched:
    asked, decisions = Request(model(), DataSheets(CLUSTER), ADAM, PLENTY), data_parallel(CLUSTER)
    plan = Estimated(decisions, asked.predict(decisions))
    return Searched((plan,), 0.0, estimate_bound_ps, status)


def test_a_bound_that_holds() -> None:
    assert searched(0.8e9).solver_gap == pytest.approx(0.25)
    assert searched(1e9 * (1 + 1e-9)).solver_gap == 0.0
    assert not searched(0.8e9).bound_words


def test_a_bound_that_is_above_an_estimate() -> None:
    found = searched(1.25e9)
    assert found.solver_gap is None
    assert "an estimate is 20.00% below its bound" in found.bound_words


@pytest.mark.parametrize(
    ("bound_ps", "status"), [(0.0, Status.COMPLETE), (inf, Status.INTERRUPTED)]
)
def test_no_bound(bound_ps: float, status: Status) -> None:
    assert searched(bound_ps, status).solver_gap is None
    assert not searched(bound_ps, status).bound_words
