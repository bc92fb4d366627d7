"""Errors that are no `ParloomError`: the machine lacks something, or it is a bug."""

import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress


def lack_words(error: Exception) -> str:
    """What this machine has not enough of, or refuses, where that is all there is to an error."""
    if isinstance(error, OSError):
        return f"the system refuses: {error}"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return (
            f"memory ran out ({str(error) or 'MemoryError'}); ask for less, or use a larger machine"
        )
    return ""


def bug_words(error: Exception, arguments: Sequence[str], version: str) -> str:
    """One line for the user; everything else goes into a file for the issue."""
    first = str(error).strip().splitlines()[:1]
    what = f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
    where = "what -v says"
    with suppress(OSError):
        file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - it stays
            "w", encoding="utf-8", prefix="parloom-bug-", suffix=".txt", delete=False
        )
        with file:
            trace = "".join(traceback.format_exception(error))
            file.write(f"parloom {version}, Python {sys.version}\n{list(arguments)}\n\n{trace}")
        where = file.name
    return f"internal error: {what}. This is a bug; please report it with {where}"
