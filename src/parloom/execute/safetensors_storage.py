"""Storage for torch.distributed.checkpoint: boxes as safetensors, metadata as JSON.

torch's own file-system reader unpickles what it reads; these two classes replace it. A save goes
into `NAME.tmp-ID`: every rank writes and syncs one safetensors file, then the coordinator checks
that all of them are there, writes and syncs `checkpoint.json`, and renames the folder to `NAME`.
A folder without that suffix is therefore complete. An older checkpoint of the same name is renamed
to `NAME.replaced-ID` first and removed last, so that at every moment one of the two can be loaded.
"""

import ctypes
import glob
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from parloom.errors import InputError, VerifyError
from parloom.execute.checksums import check_sums
from parloom.execute.manifest import (
    DTYPE_CODES,
    MANIFEST,
    REPLACED,
    TEMPORARY,
    BoxEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    damaged,
    dtype_name,
    encode_manifest,
    fsync_folder,
    read_manifest,
    resolve,
)

# A longer header is refused by safetensors when the file is read (its MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000


def box_key(name: str, offsets: Iterable[int]) -> str:
    """The key of a box in its file: the user's name and the box's offsets, `wte.weight@0,48`."""
    return f"{name}@{','.join(map(str, offsets))}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor about to be written: its key, dtype and shape, and how to get its values."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written: its size, and the CRC-32 of its header and of each entry by key."""

    size_bytes: int
    header_crc32: int
    crc32: Mapping[str, int]


def write_safetensors(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> Written:
    """Write and sync a safetensors file, holding one tensor in memory at a time.

    Wider elements come first, which keeps every tensor aligned, as safetensors itself does.
    """
    ordered = sorted(entries, key=lambda e: (-e.dtype.itemsize, e.key))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for entry in ordered:
        end = position + torch.Size(entry.shape).numel() * entry.dtype.itemsize
        header[entry.key] = {
            "dtype": DTYPE_CODES[dtype_name(entry.dtype)],
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise InputError(
            f"{path}: its {len(ordered)} boxes need a header of {len(text)} bytes, safetensors"
            f" reads {MAX_HEADER_BYTES}: the plan interleaves the shards of a long dim; shard it"
            " in blocks"
        )
    start = len(text).to_bytes(8, "little") + text
    sums: dict[str, int] = {}
    with path.open("wb") as file:
        file.write(start)
        for entry in ordered:
            values = entry.values().detach().to("cpu").contiguous()
            if values.dtype != entry.dtype or tuple(values.shape) != entry.shape:
                raise VerifyError(
                    f"{entry.key} was planned as {entry.dtype} {entry.shape},"
                    f" its values are {values.dtype} {tuple(values.shape)}"
                )
            data: Any = b""
            if values.nbytes:
                data = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
            sums[entry.key] = crc32(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Written(len(start) + position, crc32(start), sums)


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """The open file, for `keys`, `metadata` and `get_slice`.

    Raises:
        InputError: not a whole safetensors file.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise damaged(path, f"not a whole safetensors file ({error})") from error
    except FileNotFoundError as error:
        raise damaged(path, "it is missing") from error


@dataclass(frozen=True, slots=True)
class _Placement:
    """What the coordinator tells a rank: which save this is, and the name of the rank's file."""

    save_id: str
    file: str


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a rank tells the coordinator of a box that it wrote."""

    file: FileEntry
    crc32: int


class BoxWriter(StorageWriter):
    """Writes one checkpoint to `folder`; `state` is the extra state, already plain JSON data."""

    def __init__(self, folder: Path, step: int, state: dict[str, Any], plan_hash: str = "") -> None:
        self._folder = folder
        self._step = step
        self._plan_hash = plan_hash
        self._state = state
        self._temporary: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator and self._folder.exists():
            _check_replaceable(self._folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        save_id = uuid.uuid4().hex
        # Here, not in write_data: if any rank fails later, the coordinator knows what to remove.
        self._temporary = self._temporary_folder(save_id)
        self._temporary.mkdir(parents=True)
        return [
            replace(
                plan,
                storage_data=_Placement(save_id, f"rank-{i:05}-of-{len(plans):05}.safetensors"),
            )
            for i, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        placement = plan.storage_data
        assert isinstance(placement, _Placement)
        results: list[WriteResult] = []
        if plan.items:
            folder = self._temporary_folder(placement.save_id)
            folder.mkdir(parents=True, exist_ok=True)
            written = write_safetensors(
                folder / placement.file,
                [_entry(item, planner) for item in plan.items],
                {"format": "pt", "save_id": placement.save_id},
            )
            file = FileEntry(
                name=placement.file,
                size_bytes=written.size_bytes,
                header_crc32=written.header_crc32,
            )
            sums = [written.crc32[_stored_key(item)] for item in plan.items]
            results = [
                WriteResult(item.index, written.size_bytes, _Stored(file, checksum))
                for item, checksum in zip(plan.items, sums, strict=True)
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._temporary is not None, "the coordinator planned the save"
        save_id = self._temporary.name.rpartition(TEMPORARY)[2]
        manifest = self._manifest(save_id, metadata, results)
        for file in manifest.files:
            if not (self._temporary / file.name).is_file():
                raise InputError(
                    f"{self._temporary / file.name} was written by another rank and is not seen by"
                    " rank 0: a checkpoint folder must be on a file system that all ranks share"
                )
        with (self._temporary / MANIFEST).open("wb") as document:
            document.write(encode_manifest(manifest))
            document.flush()
            os.fsync(document.fileno())
        fsync_folder(self._temporary)
        self._commit(self._temporary, save_id)
        self._temporary = None

    def discard(self) -> None:
        """Remove what a failed save left; only the coordinator has anything to remove."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def _temporary_folder(self, save_id: str) -> Path:
        return self._folder.with_name(f"{self._folder.name}{TEMPORARY}{save_id}")

    def _manifest(
        self, save_id: str, metadata: Metadata, results: list[list[WriteResult]]
    ) -> Manifest:
        written = {r.index: r.storage_data for rank in results for r in rank}
        files = tuple(sorted({box.file for box in written.values()}, key=lambda f: f.name))
        position = {file: i for i, file in enumerate(files)}
        tensors: dict[str, TensorEntry] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = TensorEntry(
                dtype=dtype_name(entry.properties.dtype),
                shape=tuple(entry.size),
                boxes=tuple(
                    BoxEntry(
                        offsets=tuple(chunk.offsets),
                        sizes=tuple(chunk.sizes),
                        file=position[box.file],
                        crc32=box.crc32,
                    )
                    for chunk in entry.chunks
                    for box in (written[MetadataIndex(name, chunk.offsets)],)
                ),
            )
        return Manifest(
            save_id=save_id,
            step=self._step,
            plan_hash=self._plan_hash,
            files=files,
            tensors=tensors,
            state=self._state,
        )

    def _commit(self, temporary: Path, save_id: str) -> None:
        folder = self._folder
        if folder.exists():
            os.rename(folder, folder.with_name(f"{folder.name}{REPLACED}{save_id}"))
        os.rename(temporary, folder)
        fsync_folder(folder.parent)
        # The new checkpoint is safe: what it replaces and what killed saves left can go.
        for mark in (REPLACED, TEMPORARY):
            for stale in folder.parent.glob(glob.escape(folder.name) + mark + "[0-9a-f]" * 32):
                shutil.rmtree(stale, ignore_errors=True)


def _check_replaceable(folder: Path) -> None:
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / MANIFEST).is_file()):
        raise InputError(
            f"cannot save a checkpoint as {folder}: something that is no checkpoint has that name,"
            " and it is never overwritten; choose another name or move it away"
        )


def _entry(item: Any, planner: SavePlanner) -> Entry:
    def values() -> Tensor:
        data = planner.resolve_data(item)
        assert isinstance(data, Tensor)
        return data

    data = item.tensor_data
    return Entry(_stored_key(item), data.properties.dtype, tuple(data.chunk.sizes), values)


def _stored_key(item: Any) -> str:
    return box_key(item.index.fqn, item.tensor_data.chunk.offsets)


class BoxReader(StorageReader):
    """Reads boxes of the checkpoint at `folder`, whose manifest the caller has validated.

    Before that, each of `world` ranks compares its share of all boxes with their checksums.
    """

    def __init__(self, folder: Path, manifest: Manifest, rank: int = 0, world: int = 1) -> None:
        self._share = rank, world
        self._folder = folder
        self._manifest = manifest
        self._boxes = _index(manifest)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = resolve(Path(checkpoint_id))
            self._manifest = read_manifest(self._folder)
            self._boxes = _index(self._manifest)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return metadata_of(self._manifest)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check every header that the plan needs, before any tensor is overwritten."""
        for path, items in self._by_file(plan.items):
            with open_safetensors(path) as file:
                if (file.metadata() or {}).get("save_id") != self._manifest.save_id:
                    raise damaged(path, "it belongs to another save")
                keys = set(file.keys())
                for key in {_key(item) for item in items}:
                    if key not in keys:
                        raise damaged(path, f"it has no box {key}")
                    self._check_header(file, path, key)
        if self._manifest.has_checksums:
            check_sums(self._folder, self._manifest, *self._share)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for path, items in self._by_file(plan.items):
            with open_safetensors(path) as file:
                for item in items:
                    stored = file.get_slice(_key(item))
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(stored[box_slices(item.storage_offsets, item.lengths)])
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _by_file(self, items: list[ReadItem]) -> list[tuple[Path, list[ReadItem]]]:
        groups: dict[int, list[ReadItem]] = {}
        for item in items:
            groups.setdefault(self._boxes[_key(item)].file, []).append(item)
        return [(self._folder / self._manifest.files[i].name, groups[i]) for i in sorted(groups)]

    def _check_header(self, file: Any, path: Path, key: str) -> None:
        stored = file.get_slice(key)
        found = (stored.get_dtype(), tuple(stored.get_shape()))
        name = key.rpartition("@")[0]
        expected = (DTYPE_CODES[self._manifest.tensors[name].dtype], self._boxes[key].sizes)
        if found != expected:
            raise damaged(path, f"box {key} is {found}, the manifest says {expected}")


def metadata_of(manifest: Manifest) -> Metadata:
    """The manifest as torch.distributed.checkpoint's metadata."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, entry.dtype)),
                torch.Size(entry.shape),
                [
                    ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                    for box in entry.boxes
                ],
            )
            for name, entry in manifest.tensors.items()
        }
    )


def box_slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    """The box as an index."""
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def _key(item: ReadItem) -> str:
    return box_key(item.storage_index.fqn, item.storage_index.offset or ())


def _index(manifest: Manifest) -> dict[str, BoxEntry]:
    return {
        box_key(name, box.offsets): box
        for name, entry in manifest.tensors.items()
        for box in entry.boxes
    }
