"""Stacks of repeated blocks in a model and in a small copy of it, and which block stands for which.

A stack is a module path whose children are numbered (`model.layers`). A block of the copy stands
for the next block of the model with the same operators, and for one that is decided differently
from those before it where there is such a one. Names of the model become names of the copy, or
nothing where their block was dropped.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from parloom.ir.graph import FlatNode
from parloom.ir.plan import Decisions

ENTRY = re.compile(r"(\d+)(@\d+)?")


@dataclass(frozen=True, slots=True)
class Block:
    """The operators of one block by their keys below it, and what a plan decides for them; whether
    a block of a copy may stand for it.
    """

    kind: tuple[str, ...]
    variant: tuple[object, ...]
    usable: bool = True


Blocks = dict[str, dict[int, Block]]  # stack prefix -> index -> block


def blocks_of(
    nodes: Mapping[str, FlatNode],
    decisions: Decisions,
    stages_at: Callable[[str], Sequence[int]] = lambda key: (),
    usable: Collection[int] = (),
) -> Blocks:
    """All stacks of a program, nested ones too, by prefix. Of a pipeline blocks are `usable` whose
    operators are in these stages.
    """
    decided = {n.key: n.factors for n in decisions.nodes}
    policies = {a.prefix: (a.policy, a.values, a.moves) for a in decisions.activations}
    keys: dict[str, dict[int, list[tuple[str, str]]]] = {}
    for key in nodes:
        path, _, call = key.partition(":")
        for prefix, index, rest in _entries(path):
            keys.setdefault(prefix, {}).setdefault(index, []).append((f"{rest}:{call}", key))
    stored: dict[tuple[str, int], list[object]] = {}
    for parameter in decisions.parameters:
        for prefix, index, rest in _entries(parameter.name):
            decided_so = rest, replace(parameter, name="")
            stored.setdefault((prefix, index), []).append(decided_so)
    result: Blocks = {}
    for prefix, blocks in keys.items():
        for index, found in sorted(blocks.items()):
            stages = {stage for _, key in found for stage in stages_at(key)}
            variant = (
                tuple(decided.get(key, ()) for _, key in found),
                tuple(stored.get((prefix, index), ())),
                policies.get(f"{prefix}.{index}"),
                tuple(sorted(stages)),
            )
            kind = tuple(rest for rest, _ in found)
            block = Block(kind, variant, stages.issubset(usable))
            result.setdefault(prefix, {})[index] = block
    return result


def _entries(path: str) -> Iterator[tuple[str, int, str]]:
    """(stack prefix, index, path below the block) of every numbered part of a path."""
    parts = path.split(".")
    for position, part in enumerate(parts):
        found = ENTRY.fullmatch(part)
        if position and found:
            yield ".".join(parts[:position]), int(found[1]), ".".join(parts[position + 1 :])


@dataclass(frozen=True)
class Stacks:
    """By prefix in the copy: the model's index of each of the copy's blocks, and how many the
    model has. Stacks of equal length are not in it.
    """

    kept: Mapping[str, tuple[Mapping[int, int], int]]
    missing: tuple[str, ...] = ()  # a block of the model of each kind that the copy has not

    @classmethod
    def match(cls, big: Blocks, small: Blocks) -> "Stacks":
        """Pair the blocks of every stack that is shorter in the copy."""
        kept: dict[str, tuple[Mapping[int, int], int]] = {}
        missing: list[str] = []
        # By depth: where a stack lies inside another, its name in the model depends on that one's.
        for prefix in sorted(small, key=lambda p: p.count(".")):
            path = _big_path(kept, prefix)
            blocks = big.get(path, {})
            if not blocks or blocks.keys() == small[prefix].keys():
                continue
            usable = {index: block for index, block in blocks.items() if block.usable}
            kept[prefix] = (_pairs(usable or blocks, small[prefix]), len(blocks))
            kinds = {blocks[index].kind for index in kept[prefix][0].values()}
            first = {b.kind: i for i, b in reversed(blocks.items()) if b.kind not in kinds}
            missing += (f"{path}.{index}" for index in sorted(first.values()))
        return cls(kept, tuple(missing))

    def small_path(self, path: str) -> str | None:
        """A module path or state-dict name of the model in the copy; None if it was dropped."""
        parts: list[str] = []
        for part in path.split("."):
            pairs = self.kept.get(".".join(parts))
            found = ENTRY.fullmatch(part)
            if pairs is not None and found:
                at = [small for small, big in pairs[0].items() if big == int(found[1])]
                if not at:
                    return None
                part = f"{at[0]}{found[2] or ''}"
            parts.append(part)
        return ".".join(parts)

    def small_key(self, key: str) -> str | None:
        """An operator's key in the copy."""
        path, colon, call = key.partition(":")
        found = self.small_path(path)
        return None if found is None else f"{found}{colon}{call}"

    def changes(self) -> Iterator[str]:
        """`2 of 32 layers`, with the indices where they are not the first."""
        for prefix, (pairs, count) in self.kept.items():
            name = prefix if len(self.kept) > 1 else prefix.rpartition(".")[2]
            indices = list(pairs.values())
            which = "" if indices == list(range(len(indices))) else f" ({_listed(indices)})"
            yield f"{len(pairs)} of {count} {name}{which}"


def _listed(indices: list[int]) -> str:
    return ", ".join(str(i) for i in indices)


def _big_path(kept: Mapping[str, tuple[Mapping[int, int], int]], path: str) -> str:
    """A module path of the copy in the model."""
    parts: list[str] = []
    own: list[str] = []
    for part in path.split("."):
        pairs = kept.get(".".join(own))
        found = ENTRY.fullmatch(part)
        own.append(part)
        if pairs is not None and found:
            part = f"{pairs[0][int(found[1])]}{found[2] or ''}"
        parts.append(part)
    return ".".join(parts)


def _pairs(big: Mapping[int, Block], small: Mapping[int, Block]) -> dict[int, int]:
    """For each block of the copy the model's block that it stands for, in increasing order."""
    latest: dict[int, int] = {}
    end = max(big) + 1
    for index in sorted(small, reverse=True):
        fitting = [i for i in big if i < end and big[i].kind == small[index].kind]
        end = latest[index] = max(fitting, default=end - 1)
    pairs: dict[int, int] = {}
    seen: set[tuple[object, ...]] = set()
    start = min(big)
    for index in sorted(small):
        fitting = [
            i
            for i in sorted(big)
            if start <= i <= latest[index] and big[i].kind == small[index].kind
        ]
        new = [i for i in fitting if big[i].variant not in seen]
        chosen = (new or fitting or [latest[index]])[0]
        if chosen not in big:
            continue
        seen.add(big[chosen].variant)
        pairs[index] = chosen
        start = chosen + 1
    return pairs
