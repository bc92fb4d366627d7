"""Whole tensors of the shards that the ranks of a stage have."""

from torch import Tensor

from parloom.runtime.comm import Comm
from parloom.runtime.sharding import Dims, axes_of, put


def collect(whole: Tensor, local: Tensor, dims: Dims, comm: Comm, microbatch: int) -> None:
    """Write every rank's shard of one microbatch's part into the whole tensor."""
    mesh = comm.mesh
    axes = tuple(a for a in axes_of(dims) if a in mesh.space)
    group = comm.group(axes)
    stacked = local.new_empty(group.size, *local.shape)
    group.all_gather(stacked, local.contiguous()).wait()
    for shard, rank in zip(stacked, mesh.group(axes, comm.rank), strict=True):
        put(whole, shard, dims, mesh, mesh.coordinates(rank, microbatch))
