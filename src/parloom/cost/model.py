"""Where collectives are priced; operators are in `kernels`."""

from parloom.cost.collectives import Group, collective, group_of
from parloom.cost.price import Traffic
from parloom.ir.mesh import Cluster

__all__ = ["Group", "collective_seconds", "group_of", "traffic"]


def traffic(kind: str, num_bytes: float, group: Group, cluster: Cluster) -> tuple[Traffic, ...]:
    """What each device sends per level in the fastest collective of this kind over `group`.

    `num_bytes` is the whole tensor of the group: what all_reduce and broadcast hold on every rank,
    the result of all_gather, the input of reduce_scatter, the local tensor of all_to_all, what a
    send moves, and for halo_exchange the rows sent both ways.
    """
    return collective(kind, num_bytes, group, cluster).traffic


def collective_seconds(kind: str, num_bytes: float, group: Group, cluster: Cluster) -> float:
    """Time of one collective of `num_bytes` (see `traffic`) over `group` on `cluster`."""
    return collective(kind, num_bytes, group, cluster).seconds
