"""Every operator of the registry has a price, forward and backward, as its cases call it."""

import math
from dataclasses import replace

import pytest

from parloom.comparators.baselines import random_plan
from parloom.cost.calibration import Timed, key_of
from parloom.cost.clusters import load_cluster
from parloom.cost.kernels import Kernels, LocalOperator, Seconds
from parloom.cost.measured import Table
from parloom.cost.simulate import simulate
from parloom.cost.software import GENERATIONS
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from tests.property.cases import all_cases
from tests.property.one_operator import Program
from tests.unit.test_calibration import MADE

CASES = {case.id: case for case in all_cases()}
GPUS, CPUS = load_cluster("4xV100-16GB"), load_cluster("4xcpu")


class EstimateErrors(Table):
    """A calibration that has measured nothing of the case, and notes what it is asked."""

    def __init__(self) -> None:
        super().__init__(MADE)
        self.asked: list[LocalOperator] = []

    def seconds(self, operator: LocalOperator) -> Seconds | None:
        self.asked.append(operator)
        return super().seconds(operator)


@pytest.mark.sample(462)
@pytest.mark.parametrize("name", CASES)
def test_every_case_has_a_price(name: str) -> None:
    """From data sheets for every generation of software, and from a calibration."""
    program = Program(CASES[name])
    plan = random_plan(program.graph, program.factored, grid({"x": 2, "y": 2}), 0)
    pcg = lower(program.graph, plan, factored=program.factored)
    for software in GENERATIONS.values():
        kernels = Kernels(GPUS.device, software, product_dtype="float8")
        assert 0 < simulate(pcg, GPUS, plan, kernels=kernels).step_s < math.inf
    seen = EstimateErrors()
    step_s = simulate(pcg, CPUS, plan, kernels=Kernels(CPUS.device, measured=seen)).step_s
    assert 0 < step_s < math.inf
    timed = tuple(Timed(key_of(one), 1e-3, 2e-3) for one in seen.asked)
    kin = Table(replace(MADE, operators=timed))
    for one in seen.asked:
        for wanted in ((), one.wanted):
            found = kin.seconds(replace(one, wanted=wanted))
            assert found is None or found.forward_s > 0
