"""Checksums of a checkpoint, compared with its files before anything of them is loaded."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from parloom.execute.manifest import Manifest, damaged

CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a file from `start` to `end`, called `name` in messages."""

    file: int
    start: int
    end: int
    crc32: int | None
    name: str


def check_sums(folder: Path, manifest: Manifest, rank: int = 0, world: int = 1) -> None:
    """Compare all headers, and this rank's share of the bytes of all boxes, with the manifest.

    Raises:
        InputError: a checksum differs; names the file and the tensor.
    """
    parts = list(_parts(folder, manifest))
    total = sum(part.end - part.start for part in parts)
    done = 0
    for part in parts:
        mine = done * world // max(total, 1) == rank
        done += part.end - part.start
        if mine:
            path = folder / manifest.files[part.file].name
            with path.open("rb") as file:
                found = _crc32(file, part.start, part.end)
            if found != part.crc32:
                raise damaged(path, f"tensor {part.name} has checksum {found}, not {part.crc32}")


def _parts(folder: Path, manifest: Manifest) -> Iterator[_Part]:
    """Every box where its file's header, which is compared first, says that it lies."""
    boxes = {
        (box.file, f"{name}@{','.join(map(str, box.offsets))}"): box.crc32
        for name, entry in manifest.tensors.items()
        for box in entry.boxes
    }
    for index, entry in enumerate(manifest.files):
        path = folder / entry.name
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > entry.size_bytes or _crc32(file, 0, 8 + length) != entry.header_crc32:
                raise damaged(path, "its header has another checksum")
            file.seek(8)
            header = json.loads(file.read(length))
        for key, found in header.items():
            if key != "__metadata__":
                start, end = (8 + length + offset for offset in found["data_offsets"])
                yield _Part(index, start, end, boxes.get((index, key)), key.rpartition("@")[0])


def _crc32(file: BinaryIO, start: int, end: int) -> int:
    file.seek(start)
    value, left = 0, end - start
    while left > 0 and (data := file.read(min(left, CHUNK_BYTES))):
        value = crc32(data, value)
        left -= len(data)
    return value
