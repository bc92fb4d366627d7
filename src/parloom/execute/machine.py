"""The machine that is predicted for: a cluster, and what was measured of it if anything was."""

from dataclasses import dataclass, replace
from pathlib import Path

from parloom.cost.calibration import Calibration
from parloom.cost.clusters import LoadedCluster, on_this_machine, resolve_cluster
from parloom.cost.kernels import SPEC, Kernels
from parloom.cost.measured import (
    Source,
    calibrated,
    contended,
    error_of,
    mismatches,
    source_of,
)
from parloom.cost.simulate import simulate
from parloom.cost.timeline import Timeline
from parloom.execute.calibrate import fingerprint, read_calibration
from parloom.execute.doctor import num_cores
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, Optimizer, Prediction


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster with its assumptions, and the calibration that overrides its data sheets."""

    loaded: LoadedCluster
    calibration: Calibration | None = None
    kernels: Kernels | None = None
    different: tuple[str, ...] = ()

    @property
    def cluster(self) -> Cluster:
        return self.loaded.cluster

    def simulate(
        self, pcg: PCG, decisions: Decisions, optimizer: Optimizer | None = None
    ) -> Timeline:
        """Play one step of a lowered program."""
        played = simulate(pcg, self.cluster, decisions, optimizer, self.kernels)
        return played if self.calibration is None else contended(played, self.calibration.overlap)

    def source(self, pcg: PCG) -> Source:
        """Where a prediction for a lowered program comes from, and how sure it is."""
        if self.calibration is None or self.kernels is None:
            return Source(SPEC, error_of(SPEC, self.cluster.device))
        return source_of(pcg, self.kernels, self.calibration, self.different)

    def predict(
        self, pcg: PCG, decisions: Decisions, optimizer: Optimizer | None = None
    ) -> Prediction:
        """What a plan says of itself."""
        found, source = self.simulate(pcg, decisions, optimizer).prediction(), self.source(pcg)
        return replace(found, source=source.name, error=source.error)


def machine_for(cluster: str, calibration: str | Path | None = None) -> Machine:
    """The machine that a cluster's spec or file describes, as this computer can run it.

    Raises `InputError` for a cluster or a calibration that cannot be read.
    """
    loaded = resolve_cluster(cluster)
    shared = on_this_machine(loaded, num_cores())
    if calibration is None:
        return Machine(shared)
    found = read_calibration(Path(calibration))
    here = fingerprint() if loaded.cluster.device.name == "cpu" else None
    different = mismatches(found, loaded.cluster, here)
    slowdown = 1.0
    if found.num_ranks == 1 and shared is not loaded:
        slowdown = loaded.cluster.num_devices / num_cores()
    priced, kernels = calibrated(loaded.cluster, found, slowdown)
    measured = f"rates of {calibration}, measured on {found.fingerprint.processor}"
    ranks = f"by {found.num_ranks} ranks" if found.num_ranks > 1 else "by one process"
    lines = [f"{measured} {ranks}"]
    if slowdown > 1:
        lines.append(f"{loaded.cluster.num_devices} processes share {num_cores()} cores here")
    lines += [f"that calibration is of another machine: {line}" for line in different]
    kept = LoadedCluster(priced, (*loaded.assumptions, *lines), loaded.spec)
    return Machine(kept, found, kernels, different)
