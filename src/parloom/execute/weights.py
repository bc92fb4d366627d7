"""The user's weights in and out, as safetensors under the names of the user's state dict.

Out: the boxes of all ranks are saved as a scratch checkpoint beside the target, and every rank puts
whole tensors of its share of the output files together from it, one tensor at a time; no rank ever
holds the model. In: one tensor (or one box of it) is read when it is asked for.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parloom.errors import InputError
from parloom.execute.box_planner import Shard, by_name
from parloom.execute.checkpoint import Folder, everywhere, temporary_group, write
from parloom.execute.manifest import Manifest, TensorEntry, fsync_folder, read_manifest
from parloom.execute.safetensors_storage import (
    BoxWriter,
    Entry,
    box_key,
    box_slices,
    open_safetensors,
    write_safetensors,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What transformers cuts at; a shard is then a unit that downloads and retries well.
MAX_FILE_BYTES = 5_000_000_000


class Exportable(Protocol):
    """The runtime's trainer, on every rank."""

    def weight_shards(self) -> Iterable[Shard]:
        """Parameters and persistent buffers under the user's names, tied ones once."""


def export_safetensors(
    trainer: Exportable, path: Folder, *, max_file_bytes: int = MAX_FILE_BYTES
) -> Path:
    """Write the user's weights to a folder, as Hugging Face reads it, or to a `*.safetensors` file.

    Every rank calls it; the folder must be shared. Of tied weights the first name is written.
    Returns the file, or the index where there are several.
    """
    target = Path(path).absolute()
    single = target.suffix == ".safetensors"
    folder = target.parent if single else target
    scratch = folder / f".{target.name}.boxes"
    folder.mkdir(parents=True, exist_ok=True)
    write(by_name(trainer.weight_shards()), BoxWriter(scratch, 0, {}), scratch)
    with temporary_group() as group:
        rank, world = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
        try:
            manifest = everywhere(group, partial(read_manifest, scratch))
            parts = _parts(manifest, None if single else max_file_bytes)
            names = _file_names(target.name if single else SINGLE, len(parts))
            mine = list(zip(names, parts, strict=True))[rank::world]
            everywhere(group, partial(_assemble_all, scratch, manifest, mine))
            publish = partial(_publish, folder, scratch, names, parts, manifest)
            everywhere(group, publish if rank == 0 else _nothing)
        finally:
            # Every rank has passed a common point, whether it went well or not.
            if rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder / (names[0] if len(names) == 1 else INDEX)


def _parts(manifest: Manifest, max_file_bytes: int | None) -> list[list[str]]:
    """The tensors of every output file, in order of their names."""
    parts: list[list[str]] = [[]]
    held = 0
    for name, entry in sorted(manifest.tensors.items()):
        size = _num_bytes(entry)
        if max_file_bytes is not None and parts[-1] and held + size > max_file_bytes:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    return parts


def _num_bytes(entry: TensorEntry) -> int:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return torch.Size(entry.shape).numel() * dtype.itemsize


def _file_names(name: str, count: int) -> list[str]:
    if count == 1:
        return [name]
    stem = name.removesuffix(".safetensors")
    return [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def _assemble_all(scratch: Path, manifest: Manifest, parts: list[tuple[str, list[str]]]) -> None:
    for file, names in parts:
        entries = []
        for name in names:
            stored = manifest.tensors[name]
            values = partial(_whole, scratch, manifest, name)
            entries.append(Entry(name, getattr(torch, stored.dtype), stored.shape, values))
        write_safetensors(scratch / file, entries, {"format": "pt"})


def _whole(scratch: Path, manifest: Manifest, name: str) -> Tensor:
    stored = manifest.tensors[name]
    full = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    for box in stored.boxes:
        with open_safetensors(scratch / manifest.files[box.file].name) as file:
            full[box_slices(box.offsets, box.sizes)] = file.get_tensor(box_key(name, box.offsets))
    return full


def _publish(
    folder: Path,
    scratch: Path,
    names: list[str],
    parts: list[list[str]],
    manifest: Manifest,
) -> None:
    """Move the files to their names; an index never names files of two exports."""
    old = _read_index(folder / INDEX).values() if (folder / INDEX).is_file() else ()
    stale = {*old, SINGLE} if SINGLE in names or len(names) > 1 else set()
    if len(names) > 1:
        (folder / INDEX).unlink(missing_ok=True)
    for name in names:
        os.replace(scratch / name, folder / name)
    if len(names) > 1:
        weight_map = {
            tensor: name for name, part in zip(names, parts, strict=True) for tensor in part
        }
        total = sum(map(_num_bytes, manifest.tensors.values()))
        document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (scratch / INDEX).write_text(json.dumps(document, indent=2) + "\n")
        os.replace(scratch / INDEX, folder / INDEX)
    elif SINGLE in names:
        (folder / INDEX).unlink(missing_ok=True)
    for name in stale - set(names):
        (folder / name).unlink(missing_ok=True)
    fsync_folder(folder)


def _nothing() -> None:
    return None


class _Index(BaseModel):
    """Hugging Face's index of a sharded model; the pattern keeps files inside the folder."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/\\\x00]+\.safetensors$")]]


def _read_index(path: Path) -> dict[str, str]:
    try:
        return _Index.model_validate_json(path.read_bytes()).weight_map
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise InputError(
            f"{path}: {where}: {first['msg']}; an index maps every tensor to a safetensors file"
            " beside it: download or export the model again"
        ) from None


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights on disk; calling it with a state-dict name reads that tensor, and no other."""

    path: Path
    files: Mapping[str, Path]
    handles: dict[Path, Any]

    def __call__(self, name: str) -> Tensor:
        tensor = self._open(name).get_tensor(name)
        assert isinstance(tensor, Tensor)
        return tensor

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.files)

    def box(self, name: str, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
        """One contiguous box of a tensor; only its bytes are read."""
        tensor = self._open(name).get_slice(name)[box_slices(offsets, sizes)]
        assert isinstance(tensor, Tensor)
        return tensor

    def _open(self, name: str) -> Any:
        if name not in self.files:
            near = get_close_matches(name, self.files, n=1)
            raise InputError(
                f"{self.path} has no tensor {name}"
                + (f" (nearest: {near[0]})" if near else "")
                + f" among its {len(self.files)}: the weights are of another model, or their names"
                " have another prefix; save them from the model that is trained"
            )
        file = self.files[name]
        if file not in self.handles:
            self.handles[file] = _opened(file)
        handle = self.handles[file]
        if name not in set(handle.keys()):
            raise InputError(
                f"{file} has no tensor {name}, although the index {self.path / INDEX} says so;"
                " download or export the model again"
            )
        return handle


def import_safetensors(path: Folder) -> Weights:
    """The weights in a safetensors file, or in a folder with one file or with an index of several.

    Raises:
        InputError: no safetensors there (pickled weights are never opened), or a damaged file.
    """
    source = Path(path).absolute()
    if source.is_dir():
        if (source / SINGLE).is_file():
            return _one_file(source / SINGLE)
        if (source / INDEX).is_file():
            files = {name: source / f for name, f in _read_index(source / INDEX).items()}
            return Weights(source, files, {})
        raise InputError(f"{source} has neither {SINGLE} nor {INDEX}{_instead(source)}")
    if not source.is_file():
        raise InputError(f"{source}: there is no such file or folder; name one with {SINGLE}")
    if source.suffix != ".safetensors":
        raise InputError(
            f"{source} is no *.safetensors file; pickled weights are never opened, because"
            " unpickling runs code: convert them with safetensors.torch.save_model"
        )
    return _one_file(source)


def _one_file(file: Path) -> Weights:
    handle = _opened(file)
    return Weights(file, dict.fromkeys(handle.keys(), file), {file: handle})


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, FileNotFoundError) as error:
        raise InputError(
            f"{file} is missing or no whole safetensors file ({error}): download or export the"
            " model again"
        ) from error


def _instead(folder: Path) -> str:
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth"})
    if pickled:
        return (
            f"; {pickled[0]} is pickled and never opened, because unpickling runs code: convert it"
            " with safetensors.torch.save_model"
        )
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    return f"; name the file, for example {found[0]}" if found else "; is it the right folder?"
