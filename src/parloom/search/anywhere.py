"""A machine on which every collective is as fast as where it is fastest.

Layouts do not depend on where a mesh lies, so logical plans are searched on this machine: no
placement of one is expected to take less, and a bound is one of every placement.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parloom.cost.hardware import Hardware
from parloom.cost.kernels import Kernels
from parloom.cost.simulate import simulate
from parloom.cost.timeline import Timeline
from parloom.ir.expected import Prediction
from parloom.ir.lower_stages import LoweredStages
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, Optimizer
from parloom.ir.regular_parts import RegularPart
from parloom.search.placements import fastest_places


@dataclass(frozen=True)
class Anywhere:
    """`machine` as if a mesh could lie otherwise for each of its collectives."""

    machine: Hardware

    @property
    def cluster(self) -> Cluster:
        return self.machine.cluster

    @property
    def kernels(self) -> Kernels:
        kernels = self.machine.kernels or Kernels(self.cluster.device)
        return replace(kernels, places=fastest_places)

    def part(self, num_devices: int) -> Hardware:
        return Anywhere(self.machine.part(num_devices))

    def used_by(self, decisions: Decisions) -> Hardware:
        return Anywhere(self.machine.used_by(decisions))

    def regular(self) -> Sequence[tuple[RegularPart, Hardware]]:
        return [(part, Anywhere(machine)) for part, machine in self.machine.regular()]

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
        return self.machine.predict_stages(lowered, decisions, optimizer, repeated=repeated)
