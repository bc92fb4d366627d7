"""Where each rank of a plan is: as a table, as a rank file of Open MPI, and as the mesh of JAX.

Devices are numbered as the topology nests, the fastest links first; of a torus they are numbered
along its shortest side first. A launcher that places ranks in this order has the plan's links.
"""

from math import prod
from types import MappingProxyType

from parloom.cost.clusters import load_cluster
from parloom.cost.links import GRID
from parloom.errors import InputError
from parloom.execute.startup import devices_of_a_node
from parloom.export.rendered import rendered
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Plan
from parloom.ir.regular_parts import used_cluster

TARGETS = MappingProxyType({"ranks": "ranks.tsv", "rankfile": "rankfile", "jax": "jax_mesh.py"})
"""What says where ranks are, and the file of each."""


def order_file(target: str, plan: Plan) -> tuple[str, str]:
    """The name and the text of a file. Raises `InputError` for a pipeline, whose stages have
    meshes of their own, and where nodes would be unequal.
    """
    if len(plan.decisions.stages) > 1:
        raise InputError(f"--to {target}: the plan has stages, each with a mesh of its own")
    mesh, size = plan.decisions.mesh, devices_of_a_node(plan)
    if size is None:
        raise InputError(f"--to {target}: nodes are of several kinds")
    name = TARGETS[target]
    if target == "jax":
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
    rows = [
        (rank, device // size, device % size, tuple(mesh.coordinates(rank).values()))
        for rank, device in enumerate(mesh.devices)
    ]
    if target == "rankfile":
        return name, "".join(f"rank {rank}=+n{node} slot={slot}\n" for rank, node, slot, _ in rows)
    heads = ("rank", "node", "device", *mesh.names)
    lines = [heads, *((*map(str, row[:3]), *map(str, row[3])) for row in rows)]
    return name, "".join("\t".join(line) + "\n" for line in lines)


def device_array(mesh: Mesh) -> list[int]:
    """Devices by their coordinates, the last axis varying fastest."""
    place = {tuple(mesh.coordinates(rank).values()): d for rank, d in enumerate(mesh.devices)}
    return [place[at] for at in sorted(place)]
