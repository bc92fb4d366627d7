"""Where each rank of a plan is: as a table, as a rank file of Open MPI, and as the mesh of JAX.

Devices are numbered as the topology nests, the fastest links first; of a torus they are numbered
along its shortest side first. A launcher that places ranks in this order has the plan's links.
"""

from itertools import chain
from math import prod
from types import MappingProxyType

from parloom.cost.clusters import load_cluster
from parloom.cost.links import GRID
from parloom.errors import InputError
from parloom.execute.startup import devices_of_a_node
from parloom.export.rendered import rendered
from parloom.ir.lower_stages import rank_devices, stage_groups, stage_ranks
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions, Plan
from parloom.ir.regular_parts import used_cluster

TARGETS = MappingProxyType({"ranks": "ranks.tsv", "rankfile": "rankfile", "jax": "jax_mesh.py"})
"""What says where ranks are, and the file of each."""


def order_file(target: str, plan: Plan) -> tuple[str, str]:
    """The name and the text of a file. Raises `InputError` where nodes would be unequal, and of a
    pipeline for JAX, which has one mesh.
    """
    decisions, size = plan.decisions, devices_of_a_node(plan)
    if size is None:
        raise InputError(f"--to {target}: nodes are of several kinds")
    name = TARGETS[target]
    if target == "jax":
        if len(decisions.stages) > 1:
            raise InputError(f"--to {target}: the plan has stages, each with a mesh of its own")
        mesh = decisions.mesh
        levels = used_cluster(load_cluster(plan.cluster), plan.decisions).levels
        # A network that joins slices is above all of their sides.
        sides = [level.size for level in levels if level.size > 1 and level.fabric in GRID]
        return name, rendered(
            name,
            mesh=mesh,
            sizes=tuple(axis.size for axis in mesh.axes),
            array=device_array(mesh),
            sides=sides,
            slices=mesh.num_ranks // prod(sides) if sides else 1,
        )
    where = [divmod(device, size) for device in rank_devices(decisions)]
    if target == "rankfile":
        lines = (f"rank {rank}=+n{node} slot={slot}\n" for rank, (node, slot) in enumerate(where))
        return name, "".join(lines)
    found = _coordinates(decisions)
    heads = list(dict.fromkeys(chain.from_iterable(found)))
    rows = (
        (rank, *at, *(own.get(head, "") for head in heads))
        for rank, (at, own) in enumerate(zip(where, found, strict=True))
    )
    table = (("rank", "node", "device", *heads), *rows)
    return name, "".join("\t".join(map(str, row)) + "\n" for row in table)


def _coordinates(decisions: Decisions) -> list[dict[str, object]]:
    """Of each rank the stages that it runs, where there are several, and its place on the mesh."""
    found: list[dict[str, object]] = [{} for _ in range(decisions.num_ranks)]
    ranks, several = stage_ranks(decisions), len(decisions.stages) > 1
    for stages in stage_groups(decisions):
        about = {"stages": ",".join(map(str, stages))} if several else {}
        mesh = decisions.stages[stages[0]].mesh
        for place, rank in enumerate(ranks[stages[0]]):
            found[rank] = {**about, **mesh.coordinates(place)}
    return found


def device_array(mesh: Mesh) -> list[int]:
    """Devices by their coordinates, the last axis varying fastest."""
    place = {tuple(mesh.coordinates(rank).values()): d for rank, d in enumerate(mesh.devices)}
    return [place[at] for at in sorted(place)]
