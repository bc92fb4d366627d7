"""Names of equal blocks as one: `blocks.0-3.up.weight`."""

import re
from collections.abc import Iterable, Sequence

from parloom.ir.plan_json import numbers_text

NUMBER = re.compile(r"(?<=\.)[0-9]{1,9}(?=[.:]|$)")


def names_text(names: Iterable[str]) -> str:
    """Names, those that differ in the number of a block as one, those of the same blocks in braces:
    `blocks.0-3.{up.weight, down.weight}`; of experts in blocks alike.
    """
    return ", ".join(_folded(names))


def _folded(names: Iterable[str]) -> list[str]:
    numbers: dict[tuple[str, str], set[int]] = {}
    for name in names:
        found = NUMBER.search(name)
        key = (name[: found.start()], name[found.end() :]) if found else (name, "")
        numbers.setdefault(key, set()).update([int(found[0])] if found else [])
    tails: dict[str, list[str]] = {}
    for (head, tail), own in numbers.items():
        tails.setdefault(f"{head}{numbers_text(sorted(own))}", []).append(tail)
    return [name for head, own in tails.items() for name in _joined(head, own)]


def _joined(head: str, tails: Sequence[str]) -> list[str]:
    """What follows the same blocks, folded as names are."""
    inside = [tail[1:] for tail in tails if tail.startswith(".")]
    parts = [f"{head}{tail}" for tail in tails if not tail.startswith(".")]
    if inside:
        folded = _folded(inside)
        text = ", ".join(folded)
        parts.append(f"{head}.{{{text}}}" if len(folded) > 1 else f"{head}.{text}")
    return parts
