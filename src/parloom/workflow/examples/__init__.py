"""Workflows that are shipped, as files: `example:NAME`."""

from pathlib import Path

from parloom.errors import InputError, nearest

PREFIX = "example:"
FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The workflows there are, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml") if "-" not in path.stem))


def path_of(file: str) -> Path:
    """The path that a user names, or that of a shipped example."""
    if not file.startswith(PREFIX):
        return Path(file)
    name = file.removeprefix(PREFIX)
    if name not in names():
        raise InputError(f"no workflow {file!r}{nearest(name, names())}")
    return FOLDER / f"{name}.yaml"
