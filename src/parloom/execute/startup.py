"""Before a job trains: whether its ranks are those of the plan, told once for all of them.

Ranks that somebody else's torchrun started meet in its store before they import the script, and
those that are in a process group already (Ray's) in the store of that: each says which plan it has
and where it is, rank 0 compares, and all go on or end.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import version

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from parloom.cost.clusters import load_cluster, short_name
from parloom.errors import InputError, LaunchError
from parloom.ir.lower_stages import rank_devices
from parloom.ir.plan import DEVICES, Plan
from parloom.ir.plan_json import numbers_text, plan_hash

AGENT = "TORCHELASTIC_USE_AGENT_STORE"
TIMEOUT = timedelta(minutes=5)
FINE = "fine"


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank says of itself: its plan and version, and its node of the job."""

    rank: int
    plan: str
    version: str
    host: str
    node: int
    on_node: int


def check_ranks(plan: Plan, environment: Mapping[str, str] = os.environ) -> None:
    """Raise `LaunchError` on rank 0, and end the others with its exit code, where this job has not
    the plan's ranks, some have another plan, or a node has not the devices that are neighbors.

    Where the launcher has no store that ranks may meet in, each rank counts them for itself.
    """
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    shared = _shared_store(environment)
    if shared is None:
        check_world_size(plan, size)
        return
    store = PrefixStore("parloom/startup", shared)
    own = Place(
        rank,
        plan_hash(plan),
        version("parloom"),
        socket.gethostname(),
        int(environment.get("GROUP_RANK") or environment.get("NODE_RANK", "0")),
        int(environment.get("LOCAL_WORLD_SIZE", "1")),
    )
    # A job that torchrun starts again has the keys of its first attempt.
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    store.set(f"{attempt}/{rank}", json.dumps(asdict(own)))
    if rank == 0:
        told = (json.loads(store.get(f"{attempt}/{other}")) for other in range(size))
        why = mismatch(plan, [Place(**fields) for fields in told])
        store.set(f"{attempt}/verdict", why or FINE)
        if why:
            raise LaunchError(why)
    elif store.get(f"{attempt}/verdict").decode() != FINE:
        raise SystemExit(LaunchError.exit_code)


def check_world_size(plan: Plan, world_size: int) -> None:
    """Raise `LaunchError` unless the plan was made for that many ranks."""
    ranks, devices = plan.decisions.num_ranks, load_cluster(plan.cluster).num_devices
    if world_size == ranks:
        return
    name = short_name(plan.cluster)
    where = name if ranks == devices else f"of the {devices} of {name}"
    kept = tuple(c for c in plan.constraints if not c.text.startswith(DEVICES))
    other = replace(plan, constraints=kept, cluster="...").command()
    if ranks < world_size == devices:  # all of the cluster's ranks were started
        asked = "FILE" if plan.cluster.startswith("{") else plan.cluster
        other = replace(plan, constraints=kept, cluster=asked).command()
        other = f"{other} {DEVICES}{world_size}"
    raise LaunchError(
        f"the plan is for {ranks} ranks ({where}) and this job has {world_size}; start {ranks}"
        f" processes, or plan for {world_size}: {other}"
    )


def _shared_store(environment: Mapping[str, str]) -> Store | None:
    """A store in which the ranks of this job may meet; None where there is none."""
    if environment.get(AGENT) == "True":
        return _agent_store(environment)
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    return None


def _agent_store(environment: Mapping[str, str]) -> TCPStore:
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=TIMEOUT)


def mismatch(plan: Plan, places: Sequence[Place]) -> str:
    """Why these ranks cannot run `plan`, with the first that differs; empty where they can."""
    try:
        check_world_size(plan, len(places))
    except LaunchError as error:
        return str(error)
    first = places[0]
    for other in places:
        if other.plan != first.plan:
            return (
                f"{_where(other)} has plan {other.plan}, and {_where(first)} {first.plan}: give all"
                " nodes the same plan file"
            )
        if other.version != first.version:
            return (
                f"{_where(other)} has parloom {other.version}, and {_where(first)} {first.version}:"
                " install one version on all nodes"
            )
    nodes = dict.fromkeys(place.node for place in places)
    size = devices_of_a_node(plan)
    if len(nodes) == 1 or size is None:
        return ""
    ordered = any(stage.mesh.order for stage in plan.decisions.stages)
    devices = rank_devices(plan.decisions)
    by_device = sorted(places, key=lambda p: devices[p.rank])
    for start in range(0, len(places), size):
        own = by_device[start : start + size]
        if len({place.node for place in own}) > 1 or own[0].on_node != len(own):
            ranks = f"{start} to {start + len(own) - 1}"
            if ordered:
                ranks = numbers_text(sorted(place.rank for place in own))
            return (
                f"the plan takes ranks {ranks} to be on one node of"
                f" {size}; here {_where(own[0])} has {own[0].on_node} and {_where(own[-1])} comes"
                f" next: start {size} processes on each node"
            )
    return ""


def check_runs_here(plan: Plan) -> None:
    """Raise `InputError` for a plan whose devices parloom does not run on, as TPUs."""
    cluster = load_cluster(plan.cluster)
    if cluster.backend == "other":
        raise InputError(
            f"plans for {cluster.device.name} are predicted, and exported for other programs"
            " (parloom export), not run"
        )


def devices_of_a_node(plan: Plan) -> int | None:
    """How many devices share a host; None for a mixed cluster, and where that is not known."""
    cluster = load_cluster(plan.cluster)
    if cluster.parts:
        return None
    if cluster.host is not None:
        return cluster.host.num_devices
    return cluster.levels[0].size if len(cluster.levels) > 1 else cluster.num_devices


def _where(place: Place) -> str:
    return f"rank {place.rank} (node {place.node}, {place.host})"
