"""All that a generated program imports: `from parloom import runtime as rt`."""

from parloom.runtime.comm import Comm, DistributedComm, Group, SingleComm, Work
from parloom.runtime.context import Context
from parloom.runtime.mesh import Axis, Mesh, grid
from parloom.runtime.moves import (
    PRIMITIVES,
    all_to_all,
    combine,
    elect,
    halo_exchange,
    partition,
    reduce,
    reduce_scatter,
    replicate,
)
from parloom.runtime.program import ParameterSpec, Program, Result, Storage, TensorSpec
from parloom.runtime.sharding import Box, boxes, chunk, indices, put, take, untake
from parloom.runtime.threads import ThreadComm, run_threads

__all__ = [
    "PRIMITIVES",
    "Axis",
    "Comm",
    "Context",
    "DistributedComm",
    "Group",
    "Mesh",
    "SingleComm",
    "ParameterSpec",
    "Program",
    "Result",
    "Storage",
    "TensorSpec",
    "Box",
    "boxes",
    "chunk",
    "indices",
    "put",
    "take",
    "untake",
    "ThreadComm",
    "Work",
    "all_to_all",
    "combine",
    "elect",
    "grid",
    "halo_exchange",
    "partition",
    "reduce",
    "reduce_scatter",
    "replicate",
    "run_threads",
]
