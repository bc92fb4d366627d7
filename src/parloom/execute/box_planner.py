"""Planners for torch.distributed.checkpoint that know boxes only.

A `Shard` is what one rank holds of one tensor: boxes in coordinates of the whole tensor, each with
the slices of the local tensor where its values are. Padding has no box. Of the ranks that hold the
same box exactly one is `primary` and writes it. The save plan is proved to tile every tensor; the
load plan intersects wanted boxes with stored ones.
"""

import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from parloom.errors import InputError, VerifyError
from parloom.execute.manifest import dtype_name, tiling_problem
from parloom.execute.safetensors_storage import box_slices


class Box(Protocol):
    """`local` indexes the shard's tensor; its values are the whole tensor's at `offsets`."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def local(self) -> tuple[slice, ...]: ...


class Shard(Protocol):
    """What one rank holds of one tensor; a rank that holds nothing of it may leave it out."""

    @property
    def name(self) -> str: ...
    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def boxes(self) -> Sequence[Box]: ...
    @property
    def tensor(self) -> Tensor: ...
    @property
    def primary(self) -> bool: ...


def by_name(shards: Iterable[Shard]) -> dict[str, Any]:
    """The shards as a state dict.

    Raises:
        VerifyError: a name twice.
    """
    found: dict[str, Any] = {}
    for shard in shards:
        if shard.name in found:
            raise VerifyError(f"the trainer hands out two shards named {shard.name}")
        found[shard.name] = shard
    return found


class BoxSavePlanner(SavePlanner):
    """Plans the writing of the primary boxes of a state dict of shards."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._shards: dict[str, Shard] = state_dict
        self._boxes: dict[MetadataIndex, tuple[Shard, Box]] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for shard in self._shards.values():
            dtype_name(shard.tensor.dtype)
            for box in _stored_boxes(shard) if shard.primary else ():
                index = MetadataIndex(shard.name, box.offsets)
                self._boxes[index] = (shard, box)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=_data(shard, box)))
        kinds = {s.name: (tuple(s.global_shape), s.tensor.dtype) for s in self._shards.values()}
        return SavePlan(items, planner_data=kinds)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors: dict[str, Any] = {}
        for plan in all_plans:
            for name, (shape, dtype) in plan.planner_data.items():
                entry = tensors.setdefault(
                    name,
                    TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), []),
                )
                if (tuple(entry.size), entry.properties.dtype) != (shape, dtype):
                    raise VerifyError(
                        f"ranks disagree about {name}: {tuple(entry.size)}"
                        f" {entry.properties.dtype} and {shape} {dtype}"
                    )
            for item in plan.items:
                assert item.tensor_data is not None
                tensors[item.index.fqn].chunks.append(item.tensor_data.chunk)
        for name, entry in tensors.items():
            boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
            problem = tiling_problem(tuple(entry.size), boxes)
            if problem:
                raise VerifyError(
                    f"the primary boxes of all ranks do not make up {name}: {problem}"
                )
        return [dataclasses.replace(plan, planner_data=None) for plan in all_plans], Metadata(
            tensors
        )

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        shard, box = self._boxes[write_item.index]
        return shard.tensor[box.local]


class BoxLoadPlanner(LoadPlanner):
    """Plans the reading of all boxes of a state dict of shards, into the shards' tensors."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        self._shards: dict[str, Shard] = state_dict
        self._stored = metadata.state_dict_metadata
        self._boxes: dict[MetadataIndex, tuple[Shard, Box]] = {}

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for shard in self._shards.values():
            stored = self._stored_as(shard)
            boxes = list(_stored_boxes(shard))
            for box in boxes:
                self._boxes[MetadataIndex(shard.name, box.offsets)] = (shard, box)
            items += create_read_items_for_chunk_list(
                shard.name, stored, [_chunk(box) for box in boxes]
            )
        return LoadPlan(items, planner_data=tuple(self._shards))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        wanted = {name for plan in global_plan for name in plan.planner_data}
        unknown = sorted(set(self._stored) - wanted)
        if unknown:
            raise InputError(
                f"the checkpoint has {len(unknown)} tensors that this training run has not, the"
                f" first is {unknown[0]}: it was saved from another model or with another"
                " optimizer; build the same ones, or start from its exported weights"
            )
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise VerifyError(f"{read_item.dest_index.fqn}: checkpoints hold tensors and JSON only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        shard, box = self._boxes[read_item.dest_index]
        return shard.tensor.detach()[box.local][
            box_slices(read_item.dest_offsets, read_item.lengths)
        ]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        return None

    def _stored_as(self, shard: Shard) -> TensorStorageMetadata:
        stored = self._stored.get(shard.name)
        if not isinstance(stored, TensorStorageMetadata):
            near = get_close_matches(shard.name, self._stored, n=1)
            raise InputError(
                f"the checkpoint has no tensor {shard.name}"
                + (f" (nearest: {near[0]})" if near else "")
                + ": it was saved from another model or with another optimizer; build the same"
                " ones, or start from its exported weights"
            )
        if tuple(stored.size) != tuple(shard.global_shape):
            raise InputError(
                f"{shard.name} has shape {tuple(stored.size)} in the checkpoint and"
                f" {tuple(shard.global_shape)} here: it was saved from another model; build the"
                " model with the sizes it was saved with"
            )
        saved, here = stored.properties.dtype, shard.tensor.dtype
        # Precisions differ between plans (master weights); kinds of number never do.
        if saved != here and not (saved.is_floating_point and here.is_floating_point):
            raise InputError(
                f"{shard.name} is {saved} in the checkpoint and {here} here: only floating-point"
                " tensors change their precision on loading; build the model it was saved from"
            )
        return stored


def _stored_boxes(shard: Shard) -> Iterator[Box]:
    return (box for box in shard.boxes if math.prod(box.sizes))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _data(shard: Shard, box: Box) -> TensorWriteData:
    return TensorWriteData(
        chunk=_chunk(box),
        properties=TensorProperties(dtype=shard.tensor.dtype),
        size=torch.Size(shard.global_shape),
    )
