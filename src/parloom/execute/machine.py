"""The machine that is predicted for: a cluster, and what was measured of it if anything was."""

from dataclasses import dataclass, replace
from pathlib import Path

from parloom.cost.calibration import Calibration
from parloom.cost.clusters import LoadedCluster, on_this_machine, resolve_cluster
from parloom.cost.kernels import SPEC, Kernels
from parloom.cost.measured import (
    Source,
    calibrated,
    error_of,
    mismatches,
    source_of,
)
from parloom.cost.money import AS_LISTED, Prices
from parloom.cost.simulate import simulate
from parloom.cost.stages import simulate_stages
from parloom.cost.timeline import Timeline
from parloom.execute.calibrate import fingerprint, read_calibration
from parloom.execute.doctor import num_cores
from parloom.ir.expected import Prediction
from parloom.ir.lower_stages import LoweredStages
from parloom.ir.mesh import Cluster, check_part, part_of
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, Optimizer, Plan
from parloom.ir.regular_parts import RegularPart, regular_parts, used_cluster


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster with its assumptions, and the calibration that overrides its data sheets.

    `described` is the cluster before it was measured, and before its processes shared cores.
    `cores`: those that processes of a CPU cluster are taken to have; `notes` say where they are
    those of another machine.
    """

    loaded: LoadedCluster
    described: LoadedCluster
    calibration: Calibration | None = None
    path: str = ""
    kernels: Kernels | None = None
    different: tuple[str, ...] = ()
    cores: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def cluster(self) -> Cluster:
        return self.loaded.cluster

    def part(self, num_devices: int) -> "Machine":
        """The first devices alone; raises `InputError` where they are no part (`check_part`).

        Fewer processes on one machine have more of its cores each.
        """
        check_part(self.cluster, num_devices)
        if num_devices == self.cluster.num_devices:
            return self
        return self._on(part_of(self.described.cluster, num_devices))

    def used_by(self, decisions: Decisions) -> "Machine":
        """The devices that a plan is priced on: see `used_cluster`."""
        return self._on(used_cluster(self.described.cluster, decisions))

    def regular(self) -> "list[tuple[RegularPart, Machine]]":
        """The regular parts, each alone."""
        return [(p, self._on(p.alone)) for p in regular_parts(self.described.cluster)]

    def _on(self, cluster: Cluster) -> "Machine":
        """Devices of this machine, as they are described, as one of their own."""
        if cluster == self.described.cluster:
            return self
        described = replace(self.described, cluster=cluster)
        shares = self.cores is not None
        return _machine(described, self.calibration, self.path, self.cores, shares=shares)

    def simulate(
        self, pcg: PCG, decisions: Decisions, optimizer: Optimizer | None = None
    ) -> Timeline:
        """Play one step of a lowered program."""
        return simulate(pcg, self.cluster, decisions, optimizer, self.kernels)

    def play(
        self,
        lowered: LoweredStages,
        decisions: Decisions,
        optimizer: Optimizer | None = None,
        *,
        repeated: bool = False,
    ) -> Timeline:
        """Play one step of a lowered plan, whatever its stages; see `simulate_stages`."""
        cluster, kernels = self.cluster, self.kernels
        return simulate_stages(lowered, cluster, decisions, optimizer, kernels, repeated=repeated)

    def source(self, *pcgs: PCG, peak_bytes: int = 0) -> Source:
        """Where a prediction for the lowered programs of a plan with such a peak comes from, and
        how sure it is.
        """
        if self.calibration is None or self.kernels is None:
            return Source(SPEC, error_of(SPEC, self.cluster.device, peak_bytes), self.notes)
        found = source_of(pcgs, self.kernels, self.calibration, self.different)
        return replace(found, notes=(*found.notes, *self.notes))

    def predict(
        self, pcg: PCG, decisions: Decisions, optimizer: Optimizer | None = None
    ) -> Prediction:
        """What a plan says of itself."""
        return self._predicted(self.simulate(pcg, decisions, optimizer), pcg)

    def predict_stages(
        self,
        lowered: LoweredStages,
        decisions: Decisions,
        optimizer: Optimizer | None = None,
        *,
        repeated: bool = False,
    ) -> Prediction:
        """What a plan of several stages says of itself; see `Hardware`."""
        played = self.play(lowered, decisions, optimizer, repeated=repeated)
        return self._predicted(played, *lowered.pcgs)

    def _predicted(self, played: Timeline, *pcgs: PCG) -> Prediction:
        found = played.prediction()
        source = self.source(*pcgs, peak_bytes=found.peak_bytes)
        return replace(found, source=source.name, error=source.error, cores=self.cores)


def cluster_of(plan: Plan) -> Cluster:
    """The devices that `plan` uses, as they are described."""
    return used_cluster(resolve_cluster(plan.cluster).cluster, plan.decisions)


def machine_of(plan: Plan, calibration: str | Path | None = None) -> Machine:
    """The devices that `plan` uses, with the cores that it was predicted for.

    Raises `InputError` as `machine_for` does.
    """
    planned = plan.prediction.cores if plan.prediction else None
    return machine_for(plan.cluster, calibration, planned).used_by(plan.decisions)


def machine_for(
    cluster: str,
    calibration: str | Path | None = None,
    planned: int | None = None,
    num_devices: int | None = None,
    prices: Prices = AS_LISTED,
) -> Machine:
    """The machine that a cluster's spec or file describes, or its first `num_devices` devices;
    `prices` replace those of its devices.

    Processes of a CPU cluster share the cores of the machine that was calibrated, else those that a
    plan was made for (`planned`), else those of this computer. Raises `InputError` for a cluster or
    a calibration that cannot be read, or where there is no such part.
    """
    found = None if calibration is None else read_calibration(Path(calibration))
    whole = _machine(resolve_cluster(cluster, prices), found, str(calibration or ""), planned)
    return whole if num_devices is None else whole.part(num_devices)


def _machine(
    loaded: LoadedCluster,
    found: Calibration | None,
    path: str,
    planned: int | None,
    *,
    shares: bool = True,
) -> Machine:
    """`loaded` with the rates that were measured (read from `path`), and with shared cores where it
    `shares` those of one machine: parts of a cluster do as the whole one does.
    """
    measured = found.fingerprint.cores if found and found.fingerprint.device == "cpu" else None
    cores, notes = _cores(loaded.cluster, measured or planned) if shares else (None, ())
    shared = loaded if cores is None else on_this_machine(loaded, cores)
    if found is None:
        return Machine(shared, loaded, cores=cores, notes=notes)
    here = fingerprint() if loaded.cluster.device.name == "cpu" else None
    different = mismatches(found, loaded.cluster, here)
    slowdown = 1.0
    if found.num_ranks == 1 and cores is not None:
        slowdown = loaded.cluster.num_devices / cores
    priced, kernels = calibrated(loaded.cluster, found, slowdown)
    rates = f"rates of {path}, measured on {found.fingerprint.processor}"
    ranks = f"by {found.num_ranks} ranks" if found.num_ranks > 1 else "by one process"
    lines = [f"{rates} {ranks}"]
    if slowdown > 1:
        lines.append(f"{loaded.cluster.num_devices} processes share {cores} cores")
    lines += [f"that calibration is of another machine: {line}" for line in different]
    kept = LoadedCluster(priced, (*loaded.assumptions, *lines), loaded.spec)
    return Machine(kept, loaded, found, path, kernels, different, cores, notes)


def _cores(cluster: Cluster, known: int | None) -> tuple[int | None, tuple[str, ...]]:
    """The cores that processes on one machine have, not more than there are processes, and whether
    this computer has others; None where the cluster is no such machine.
    """
    if cluster.device.name != "cpu" or len(cluster.levels) > 1 or cluster.parts:
        return None, ()
    here, ranks = num_cores(), cluster.num_devices
    cores = min(known or here, ranks)
    if cores == min(here, ranks):
        return cores, ()
    return cores, (f"predicted for a machine with {cores} cores; this one has {here}",)
