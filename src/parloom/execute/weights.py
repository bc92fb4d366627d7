"""The user's weights in and out, as safetensors under the names of the user's state dict.

Out: the boxes of all ranks are saved as a scratch checkpoint beside the target, and every rank puts
whole tensors of its share of the output files together from it, one tensor at a time; no rank ever
holds the model. In: one tensor (or one box of it) is read when it is asked for.
"""

import json
import os
import shutil
from collections.abc import Container, Iterable, Mapping
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
from parloom.input_files import MIB, read_input

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_INDEX_BYTES = 64 * MIB
# How the trainer names the states of its optimizer: `optimizer/exp_avg/wte.weight`.
OPTIMIZER = "optimizer/"
# What transformers cuts at; a shard is then a unit that downloads and retries well.
MAX_FILE_BYTES = 5_000_000_000


class _Parameter(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...


class _Program(Protocol):
    @property
    def parameters(self) -> Iterable[_Parameter]: ...


class _Pipeline(Protocol):
    @property
    def programs(self) -> Iterable[_Program]: ...


class Exportable(Protocol):
    """The runtime's trainer, on every rank: shards, and the dtypes that the model computes in."""

    @property
    def pipeline(self) -> _Pipeline: ...

    def shards(self) -> Iterable[Shard]: ...


def export_safetensors(
    trainer: Exportable,
    path: Folder,
    *,
    names: Container[str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write the user's weights to a folder, as Hugging Face reads it, or to a `*.safetensors` file.

    Every rank calls it; the folder must be shared. `names` are those of the user's state dict: they
    leave out buffers that it does not have. Of tied weights the first name is written. Master
    weights are written in the parameter's own dtype. Returns the file, or the index of several.
    """
    target = Path(path).absolute()
    single = target.suffix == ".safetensors"
    folder = target.parent if single else target
    scratch = folder / f".{target.name}.boxes"
    programs = trainer.pipeline.programs
    dtypes = {spec.name: spec.dtype for program in programs for spec in program.parameters}
    shards = by_name(s for s in trainer.shards() if is_weight(s.name, names))
    with temporary_group() as group:
        rank, world = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
        everywhere(group, partial(folder.mkdir, parents=True, exist_ok=True))
        write(shards, BoxWriter(scratch, 0, {}), scratch)
        try:
            manifest = everywhere(group, partial(read_manifest, scratch))
            parts = _parts(manifest, dtypes, None if single else max_file_bytes)
            files = _file_names(target.name if single else SINGLE, len(parts))
            mine = list(zip(files, parts, strict=True))[rank::world]
            everywhere(group, partial(_assemble_all, scratch, manifest, mine))
            publish = partial(_publish, folder, scratch, files, parts)
            everywhere(group, publish if rank == 0 else _nothing)
        finally:
            # Every rank has passed a common point, whether it went well or not.
            if rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder / (files[0] if len(files) == 1 else INDEX)


def is_weight(name: str, names: Container[str] | None) -> bool:
    """Whether a shard of that name belongs to the user's state dict."""
    return not name.startswith(OPTIMIZER) and (names is None or name in names)


@dataclass(frozen=True, slots=True)
class _Output:
    """A whole tensor to be written, in the dtype of the user's model."""

    name: str
    stored: TensorEntry
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.stored.shape).numel() * self.dtype.itemsize


def _parts(
    manifest: Manifest, dtypes: Mapping[str, str], max_file_bytes: int | None
) -> list[list[_Output]]:
    """The tensors of every output file, in order of their names."""
    parts: list[list[_Output]] = [[]]
    held = 0
    for name, stored in sorted(manifest.tensors.items()):
        output = _Output(name, stored, getattr(torch, dtypes.get(name, stored.dtype)))
        if max_file_bytes is not None and parts[-1] and held + output.num_bytes > max_file_bytes:
            parts.append([])
            held = 0
        parts[-1].append(output)
        held += output.num_bytes
    return parts


def _file_names(name: str, count: int) -> list[str]:
    if count == 1:
        return [name]
    stem = name.removesuffix(".safetensors")
    return [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def _assemble_all(
    scratch: Path, manifest: Manifest, parts: list[tuple[str, list[_Output]]]
) -> None:
    for file, outputs in parts:
        entries = [
            Entry(o.name, o.dtype, o.stored.shape, partial(_whole, scratch, manifest, o))
            for o in outputs
        ]
        write_safetensors(scratch / file, entries, {"format": "pt"})


def _whole(scratch: Path, manifest: Manifest, output: _Output) -> Tensor:
    full = torch.empty(output.stored.shape, dtype=output.dtype)
    for box in output.stored.boxes:
        with open_safetensors(scratch / manifest.files[box.file].name) as file:
            values = file.get_tensor(box_key(output.name, box.offsets))
            full[box_slices(box.offsets, box.sizes)] = values
    return full


def _publish(folder: Path, scratch: Path, files: list[str], parts: list[list[_Output]]) -> None:
    """Move the files to their names; an index never names files of two exports."""
    whole_folder = SINGLE in files or len(files) > 1
    index = folder / INDEX
    stale = {SINGLE} if whole_folder else set()
    if whole_folder and index.is_file():
        stale |= set(_read_index(index).values())
    if len(files) > 1:
        index.unlink(missing_ok=True)
    for file in files:
        os.replace(scratch / file, folder / file)
    if len(files) > 1:
        total = sum(output.num_bytes for part in parts for output in part)
        weight_map = {o.name: file for file, part in zip(files, parts, strict=True) for o in part}
        document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (scratch / INDEX).write_text(json.dumps(document, indent=2) + "\n")
        os.replace(scratch / INDEX, index)
    elif whole_folder:
        index.unlink(missing_ok=True)
    for file in stale - set(files):
        (folder / file).unlink(missing_ok=True)
    fsync_folder(folder)


def _nothing() -> None:
    return None


class _Index(BaseModel):
    """Hugging Face's index of a sharded model; the pattern keeps files inside the folder."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/\\\x00]+\.safetensors$")]]


def _read_index(path: Path) -> dict[str, str]:
    try:
        return _Index.model_validate_json(
            read_input(path, "the index", MOST_INDEX_BYTES)
        ).weight_map
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
