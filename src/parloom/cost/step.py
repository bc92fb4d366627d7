"""All works and transfers of one training step of a lowered plan, which `cost.simulate` plays."""

from dataclasses import dataclass

from parloom.cost.kernels import Kernels
from parloom.cost.liveness import Lives
from parloom.cost.parameters import Parameters, Transfer
from parloom.cost.walk import Walker
from parloom.cost.works import Walked
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, Optimizer
from parloom.ir.stages import ARRIVING


@dataclass(frozen=True, slots=True)
class Priced:
    """A lowered program with all its works and transfers: what is summed up, or played."""

    walker: Walker
    main: Walked
    prologue: Walked
    parameters: Parameters
    buckets: tuple[Transfer, ...]

    @property
    def reductions(self) -> tuple[Transfer, ...]:
        """All that gradients send."""
        heads = (*self.parameters.unit_reductions, *self.buckets)
        return tuple(transfer for head in heads for transfer in head.chain())


def priced(
    pcg: PCG,
    cluster: Cluster,
    decisions: Decisions,
    optimizer: Optimizer | None = None,
    kernels: Kernels | None = None,
) -> Priced:
    """Price all works and transfers of `pcg`, which was lowered from `decisions`, on `cluster`.

    `kernels` price operators; by default those of the cluster's device and parloom's own software.
    """
    walker = Walker(pcg.by_name, pcg.mesh, cluster, kernels)
    entries = [(entry.kind, entry.value.name) for entry in pcg.graph.inputs]
    # What another stage made takes memory when it arrives.
    arriving = {e.value.name for e in pcg.graph.inputs if e.kind == ARRIVING}
    arriving |= {e.value.name for e in pcg.graph.of_kind("batch") if e.trainable}
    outside = frozenset(name for kind, name in entries if kind != "constant") - arriving
    weights = frozenset(name for kind, name in entries if kind == "parameter")
    results = (*pcg.outputs, *pcg.updates)
    names = {value.name for _, value in results}
    if pcg.loss is not None and not pcg.loss.spec.shape:  # what a stage sends leaves it
        names.add(pcg.loss.name)
    held = frozenset(names) - outside - arriving
    crossing = frozenset(arriving | {value.name for value in pcg.leaving})
    inputs, kernels = pcg.main.inputs, walker.kernels_of_main
    lives = Lives(outside, weights, held, crossing)
    main = walker.walk(inputs, pcg.main.body, lives, kernels=kernels)
    prologue = walker.walk(inputs, pcg.prologue, Lives(outside, weights), kernels=kernels)
    parameters = Parameters(pcg, walker, decisions, optimizer or Optimizer())
    return Priced(walker, main, prologue, parameters, parameters.buckets(main.backward))
