"""`checkpoint.json`: what a checkpoint folder holds, as validated JSON.

A checkpoint is a folder with one safetensors file per writing rank and this document, which says
for every tensor its dtype, its global shape and the boxes (offset, size, file) that tile it, and
carries the trainer's extra state. Nothing in the folder is ever unpickled or executed: other files
are not looked at, and file names in the document are held to one pattern, so that it cannot point
elsewhere. `digest` is the SHA-256 of the document with the digest itself left out; `save_id` is
repeated in every safetensors file, so that files of two saves never mix. Every box and every file's
header has its CRC-32, which catches what disks and networks do to bits; who edits a checkpoint can
edit checksums too. Version 1 had none.
"""

import glob
import hashlib
import json
import math
import os
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from parloom.errors import InputError

MANIFEST = "checkpoint.json"
TEMPORARY = ".tmp-"
REPLACED = ".replaced-"

# torch's name of a dtype -> its code in a safetensors header (safetensors format specification).
DTYPE_CODES: Mapping[str, str] = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint8": "U8",
        "bool": "BOOL",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
    }
)

_FLOAT = "float"
_NO_DIGEST = b'"digest": ""'

Size = Annotated[int, Field(ge=0)]
Checksum = Annotated[int, Field(ge=0, lt=2**32)]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class BoxEntry(_Document):
    """One stored box of a tensor; `file` is an index into the manifest's `files`."""

    offsets: tuple[Size, ...]
    sizes: tuple[Size, ...]
    file: Size
    crc32: Checksum | None = None


class TensorEntry(_Document):
    """A tensor by its dtype (torch's name), global shape and the boxes that tile it."""

    dtype: str
    shape: tuple[Size, ...]
    boxes: tuple[BoxEntry, ...]


class FileEntry(_Document):
    """One rank's safetensors file; the pattern keeps paths inside the folder."""

    name: Annotated[str, Field(pattern=r"^rank-[0-9]{5}-of-[0-9]{5}\.safetensors$")]
    size_bytes: Size
    header_crc32: Checksum | None = None


class Manifest(_Document):
    """The whole document; `state` is the trainer's extra state, `plan_hash` names the plan."""

    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    format: Literal["parloom.checkpoint"] = "parloom.checkpoint"
    version: Literal[1, 2] = 2
    save_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    step: Size
    plan_hash: str = ""
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    state: dict[str, JsonValue]

    @property
    def has_checksums(self) -> bool:
        return self.version >= 2


def dtype_name(dtype: object) -> str:
    """The name of a torch dtype that safetensors can hold.

    Raises:
        InputError: it cannot.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_CODES:
        raise InputError(
            f"a tensor of dtype {name} cannot be saved: safetensors has {', '.join(DTYPE_CODES)};"
            " convert it before it is saved"
        )
    return name


def encode_state(state: Mapping[str, Any]) -> dict[str, JsonValue]:
    """The extra state as strict JSON data, detached from the trainer's own.

    Raises:
        InputError: the state holds something that JSON cannot say.
    """
    try:
        plain = json.loads(json.dumps(_finite(dict(state)), allow_nan=False))
    except TypeError as error:
        raise InputError(
            f"the extra state of the trainer is not JSON: {error}; a checkpoint holds numbers,"
            " strings, lists and dicts with string keys, and never pickles: convert the value"
        ) from error
    assert isinstance(plain, dict)
    return plain


def decode_state(state: Mapping[str, JsonValue]) -> dict[str, Any]:
    """What `encode_state` was given, with lists for tuples."""
    return {key: _with_non_finite(value) for key, value in state.items()}


def _finite(value: Any) -> Any:
    """Infinity and NaN, which schedulers start from and JSON has not, as `{"float": "inf"}`."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(float(value))}
    return value


def _with_non_finite(value: JsonValue) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_FLOAT}:
            return float(str(value[_FLOAT]))
        return {key: _with_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_non_finite(item) for item in value]
    return value


def encode_manifest(manifest: Manifest) -> bytes:
    """The document with its digest filled in, one tensor a line."""
    tensors = ",\n  ".join(
        f"{json.dumps(name)}: {json.dumps(entry.model_dump(mode='json'))}"
        for name, entry in sorted(manifest.tensors.items())
    )
    head = manifest.model_dump(mode="json", exclude={"tensors", "digest"})
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    text = ",\n ".join(['"digest": ""', *lines, f'"tensors": {{\n  {tensors}\n }}'])
    body = f"{{\n {text}\n}}\n".encode()
    digest = hashlib.sha256(body).hexdigest()
    return body.replace(_NO_DIGEST, f'"digest": "{digest}"'.encode(), 1)


def decode_manifest(raw: bytes, path: Path) -> Manifest:
    """The validated document.

    Raises:
        InputError: truncated, edited, or not a checkpoint's document.
    """
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise damaged(path, f"{where}: {first['msg']}") from None
    body = raw.replace(f'"digest": "{manifest.digest}"'.encode(), _NO_DIGEST, 1)
    if hashlib.sha256(body).hexdigest() != manifest.digest:
        raise damaged(path, f"its digest is not {manifest.digest[:16] or '(empty)'}")
    sums = [box.crc32 for entry in manifest.tensors.values() for box in entry.boxes]
    if manifest.has_checksums and None in (*sums, *(file.header_crc32 for file in manifest.files)):
        raise damaged(path, "a checksum is missing")
    for name, entry in manifest.tensors.items():
        if entry.dtype not in DTYPE_CODES:
            known = ", ".join(DTYPE_CODES)
            raise damaged(path, f"tensor {name}: unknown dtype {entry.dtype!r} (known: {known})")
        problem = tiling_problem(entry.shape, [(box.offsets, box.sizes) for box in entry.boxes])
        beyond = [box.file for box in entry.boxes if box.file >= len(manifest.files)]
        if beyond:
            problem = f"it is in file {beyond[0]} of {len(manifest.files)}"
        if problem:
            raise damaged(path, f"tensor {name}: {problem}")
    return manifest


def damaged(path: Path, problem: str) -> InputError:
    """The error for a file that cannot be trusted."""
    return InputError(
        f"checkpoint file {path}: {problem}; the file was truncated or edited after it was saved,"
        " or is from another save: restore the folder from a copy, or load another checkpoint"
    )


def resolve(folder: Path) -> Path:
    """The folder, or the copy that a save killed between its two renames left behind."""
    if not folder.exists():
        for copy in sorted(folder.parent.glob(f"{glob.escape(folder.name)}{REPLACED}*")):
            if (copy / MANIFEST).is_file():
                return copy
    return folder


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished checkpoint whose files are all there in full length.

    Raises:
        InputError: no such checkpoint, an unfinished one, another format, or a damaged one.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(f"{folder} is no checkpoint: {_why_none(folder)}")
    manifest = decode_manifest(path.read_bytes(), path)
    for file in manifest.files:
        member = folder / file.name
        if not member.is_file():
            raise damaged(member, "it is missing")
        if member.stat().st_size != file.size_bytes:
            raise damaged(member, f"{member.stat().st_size} bytes, not {file.size_bytes}")
    return manifest


def stale_folders(folder: Path) -> list[Path]:
    """Temporary folders beside checkpoint `folder`: of saves that were killed, or are under way."""
    pattern = f"*{TEMPORARY}{'[0-9a-f]' * 32}"
    return sorted(path for path in folder.parent.glob(pattern) if path.is_dir())


def _why_none(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder; look for the run's checkpoints beside it"
    if TEMPORARY in folder.name:
        return "the save was interrupted before it was complete; load the checkpoint before it"
    if (folder / ".metadata").exists():
        return (
            "it has torch.distributed.checkpoint's own pickled `.metadata`, which is never read"
            " because unpickling runs code; save it again with parloom, or as safetensors"
        )
    inside = sorted(p.name for p in folder.iterdir() if (p / MANIFEST).is_file())
    hint = f"; did you mean {folder / inside[-1]}?" if inside else "; name the checkpoint's folder"
    return f"it has no {MANIFEST}{hint}"


def tiling_problem(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> str | None:
    """Why the (offsets, sizes) boxes do not tile the shape exactly once, or None.

    Layouts cut every dim at fixed places, so the boxes are the cells of a grid: they are counted on
    the coordinates of their cuts.
    """
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"box {offsets}+{sizes} has another rank than shape {shape}"
        if any(o + n > s or n == 0 for o, n, s in zip(offsets, sizes, shape, strict=True)):
            return f"box {offsets}+{sizes} is empty or outside shape {shape}"
    stored = sum(math.prod(sizes) for _, sizes in boxes)
    if stored != math.prod(shape):
        return f"boxes hold {stored} elements, shape {shape} has {math.prod(shape)}"
    if len({offsets for offsets, _ in boxes}) != len(boxes):
        return "two boxes have the same offsets"
    cuts = [sorted({offsets[d] for offsets, _ in boxes}) for d in range(len(shape))]
    if math.prod(map(len, cuts)) > 16 * len(boxes) + 1024:
        return "the boxes do not form a grid"
    count = np.zeros([len(c) for c in cuts], dtype=np.int32)
    for offsets, sizes in boxes:
        count[
            tuple(
                slice(bisect_left(c, o), bisect_left(c, o + n))
                for c, o, n in zip(cuts, offsets, sizes, strict=True)
            )
        ] += 1
    return None if (count == 1).all() else "the boxes overlap"


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in the folder survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
