"""The devices that a plan is for, and how a step on them is predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from parloom.cost.kernels import Kernels
from parloom.cost.simulate import simulate
from parloom.cost.stages import simulate_stages
from parloom.cost.timeline import Timeline
from parloom.ir.expected import Prediction
from parloom.ir.lower_stages import LoweredStages
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, Optimizer
from parloom.ir.regular_parts import RegularPart, regular_parts, used_cluster


class Hardware(Protocol):
    """A cluster whose steps can be predicted."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def kernels(self) -> Kernels | None: ...

    def part(self, num_devices: int) -> "Hardware":
        """The first devices alone."""

    def used_by(self, decisions: Decisions) -> "Hardware":
        """The devices that a plan is priced on: see `used_cluster`."""

    def regular(self) -> "Sequence[tuple[RegularPart, Hardware]]":
        """The regular parts, each alone."""

    def simulate(self, pcg: PCG, decisions: Decisions, optimizer: Optimizer) -> Timeline:
        """Play one step of a lowered program."""

    def predict(self, pcg: PCG, decisions: Decisions, optimizer: Optimizer) -> Prediction:
        """What a plan says of itself."""

    def predict_stages(
        self,
        lowered: LoweredStages,
        decisions: Decisions,
        optimizer: Optimizer,
        *,
        repeated: bool = False,
    ) -> Prediction:
        """The same of a plan of several stages; where steps are `repeated`, of the time from one to
        the next.
        """


@dataclass(frozen=True, slots=True)
class DataSheets:
    """A cluster of which nothing was measured."""

    cluster: Cluster
    kernels: Kernels | None = None

    def part(self, num_devices: int) -> "DataSheets":
        return replace(self, cluster=part_of(self.cluster, num_devices))

    def used_by(self, decisions: Decisions) -> "DataSheets":
        return replace(self, cluster=used_cluster(self.cluster, decisions))

    def regular(self) -> "Sequence[tuple[RegularPart, DataSheets]]":
        return [(p, replace(self, cluster=p.alone)) for p in regular_parts(self.cluster)]

    def simulate(self, pcg: PCG, decisions: Decisions, optimizer: Optimizer) -> Timeline:
        return simulate(pcg, self.cluster, decisions, optimizer, self.kernels)

    def predict(self, pcg: PCG, decisions: Decisions, optimizer: Optimizer) -> Prediction:
        return self.simulate(pcg, decisions, optimizer).prediction()

    def predict_stages(
        self,
        lowered: LoweredStages,
        decisions: Decisions,
        optimizer: Optimizer,
        *,
        repeated: bool = False,
    ) -> Prediction:
        cluster, kernels = self.cluster, self.kernels
        return simulate_stages(
            lowered, cluster, decisions, optimizer, kernels, repeated=repeated
        ).prediction()
