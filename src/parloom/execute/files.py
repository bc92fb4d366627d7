"""Files on disk: whole or not at all."""

import contextlib
import os
from pathlib import Path

from parloom.errors import InputError
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_from_json


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Write `content` so that `path` is at any moment the old file or the whole new one.

    Makes the folder when it is missing. Raises `InputError` where the system refuses.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    # In the same folder, because a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; choose another folder with --out"
        ) from None
    return path


def read_plan(path: Path) -> Plan:
    """The plan in a file, or in the `plan.json` of a folder; raises `InputError`."""
    file = path / "plan.json" if path.is_dir() else path
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read the plan {file}: {error.strerror or error}; make one with `parloom plan`"
        ) from None
    return plan_from_json(data, str(file))
