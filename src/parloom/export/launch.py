"""Launch files: the plan's ranks as a job of Slurm, Kubernetes, SkyPilot, Ray or plain torchrun.

All of them start torchrun, or its equal, on every node, with the plan's ranks in its order, and
`parloom run` in each rank, which compares them before the script begins (`execute.startup`).
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from parloom.cost.clusters import load_cluster
from parloom.errors import InputError
from parloom.execute.startup import check_runs_here, devices_of_a_node
from parloom.export.rendered import rendered
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_hash

TARGETS = MappingProxyType(
    {
        "slurm": "train.sbatch",
        "k8s": "trainjob.yaml",
        "skypilot": "sky.yaml",
        "ray": "ray_train.py",
        "torchrun": "torchrun.sh",
    }
)
"""The launchers, and the file of each."""
STARTS = MappingProxyType(
    {
        "slurm": "sbatch {}",
        "k8s": "kubectl apply -f {}",
        "skypilot": "sky launch {}",
        "ray": "python {}",
        "torchrun": "bash {}",
    }
)
"""The command that starts each file, `torchrun`'s on every node."""
# Sizes of memory that SkyPilot names, where a device comes with several.
SIZES = frozenset({("A100", "80GB"), ("V100", "32GB")})


@dataclass(frozen=True, slots=True)
class Job:
    """What all launchers need to know; `arguments` are the script and its own."""

    plan: str
    hash: str
    arguments: tuple[str, ...]
    nodes: int
    per_node: int
    backend: str
    device: str

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def script(self) -> str:
        """As a shell reads it."""
        return shlex.join(self.arguments)

    @property
    def accelerator(self) -> str:
        """What SkyPilot calls the device: H100, A100-80GB."""
        kind, *more = self.device.split("-")
        sizes = [size for size in more if (kind, size) in SIZES]
        return "-".join([kind, *sizes])


def job_of(plan: Plan, path: str, script: Sequence[str]) -> Job:
    """The job of a plan at `path`. Raises `InputError` where nodes would be unequal, or parloom
    does not run on their devices.
    """
    cluster, ranks = load_cluster(plan.cluster), plan.decisions.num_ranks
    size = devices_of_a_node(plan)
    if size is None:
        raise InputError(
            f"{cluster.name} has nodes of several kinds, for which no launch file is written: start"
            " torchrun on each, with its ranks in the plan's order"
        )
    if any(stage.mesh.order for stage in plan.decisions.stages):
        raise InputError(
            "the plan has ranks on devices in an order of its own, in which torchrun starts none:"
            " export --to rankfile, or --to jax, says where they are"
        )
    check_runs_here(plan)
    per_node = min(size, ranks)
    if ranks % per_node:
        raise InputError(f"{ranks} ranks do not divide over nodes of {per_node} devices")
    return Job(
        path,
        plan_hash(plan),
        tuple(script),
        ranks // per_node,
        per_node,
        cluster.backend,
        cluster.device.name,
    )


def launch_file(target: str, job: Job) -> tuple[str, str]:
    """The name and the text of a launch file."""
    name = TARGETS[target]
    return name, rendered(name, job=job)
