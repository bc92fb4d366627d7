"""Where two plans of one model lay out tensors differently, grouped by the user's module names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from parloom.export.roles import Digits, Roles, dims_of, dims_text, merged
from parloom.ir.pcg import PCG, PParameter
from parloom.ir.plan import Storage
from parloom.report.folded import names_text
from parloom.report.naming import Names

"""The number of a block in a name: `blocks.3.up.weight`."""
STORED = ("weights", "gradients", "optimizer state")


@dataclass(frozen=True)
class Stored:
    """How a parameter lies: its dims as computed with, and over which ranks its weight, gradient
    and optimizer state are stored in chunks.
    """

    dims: tuple[Digits, ...]
    chunks: tuple[Digits, ...]


@dataclass(frozen=True)
class Program:
    """A lowered program (or a stage of one) with the roles of its axes."""

    pcg: PCG
    roles: Roles

    @cached_property
    def parameters(self) -> Mapping[str, Stored]:
        """How parameters lie, by the user's names."""
        return {p.input.target: self._stored(p) for p in self.pcg.parameters}

    @cached_property
    def operators(self) -> Mapping[str, Mapping[str, Digits]]:
        """Factor to roles of operators of activations, by their keys."""
        mesh = self.pcg.decisions.mesh
        decided = {node.key: node.factors for node in self.pcg.decisions.nodes}
        found: dict[str, Mapping[str, Digits]] = {}
        for flat in self.pcg.graph.flat():
            if any(value.spec.is_float for value in flat.node.results):
                own = ((f, merged(a, self.roles, mesh)) for f, a in decided.get(flat.key, ()))
                found[flat.key] = {factor: digits for factor, digits in own if digits}
        return found

    def _stored(self, parameter: PParameter) -> Stored:
        mesh, decision = self.pcg.decisions.mesh, parameter.decision
        dims = dims_of(parameter.layout, parameter.input.value.spec.shape, self.roles, mesh)
        roles = (decision.weight, decision.gradient, decision.optimizer)
        return Stored(dims, tuple(map(self._over, roles)))

    def _over(self, storage: Storage) -> Digits:
        """Over which ranks chunks are: in any order."""
        own = sorted(storage.axes, key=lambda axis: self.roles[axis])
        return merged(tuple(own), self.roles, self.pcg.decisions.mesh)


def parameter_differences(plan: Sequence[Program], meant: Program) -> Iterator[str]:
    """Parameters of a plan's stages that `meant` has otherwise, in words."""
    first: dict[str, Stored] = {}
    for program in plan:
        for name, stored in program.parameters.items():
            first.setdefault(name, stored)  # the stage that owns it
    lines: dict[str, list[str]] = {}
    for name, own in first.items():
        other = meant.parameters.get(name)
        if other is not None:
            for words in _parameter_words(own, other):
                lines.setdefault(words, []).append(name)
    for words, names in lines.items():
        yield f"{names_text(names)}: {words}"


def _parameter_words(own: Stored, other: Stored) -> Iterator[str]:
    if own.dims != other.dims:
        yield f"laid out as {dims_text(own.dims)}, not {dims_text(other.dims)}"
    chunks: dict[tuple[str, str], list[str]] = {}
    for what, mine, its in zip(STORED, own.chunks, other.chunks, strict=True):
        if mine != its:
            chunks.setdefault((_chunk_text(mine), _chunk_text(its)), []).append(what)
    for (mine_text, its_text), stored in chunks.items():
        yield f"{' and '.join(stored)} stored {mine_text}, not {its_text}"


def _chunk_text(over: Digits) -> str:
    return " and ".join(f"over {size} {role}-parallel ranks" for role, size in over) or "whole"


def operator_differences(plan: Sequence[Program], meant: Program, names: Names) -> Iterator[str]:
    """Operators of a plan's stages that `meant` splits otherwise, in words; `names` are those of
    their factors.
    """
    lines: dict[str, list[str]] = {}
    for program in plan:
        for key, own in program.operators.items():
            other = meant.operators.get(key)  # one that a rewrite makes is not there
            if other is not None and own != other and names[key].keys() >= {*own, *other}:
                mine, its = (_factors_text(factors, names[key]) for factors in (own, other))
                lines.setdefault(split_words(mine, its), []).append(key)
    for words, keys in lines.items():
        yield f"results of {names_text(keys)}: {words}"


def _factors_text(factors: Mapping[str, Digits], names: Mapping[str, str]) -> str:
    """`samples over data 4 and output features over tensor 2`."""
    found = (
        f"{names[factor]} over {' and '.join(f'{role} {size}' for role, size in digits)}"
        for factor, digits in sorted(factors.items())
    )
    return " and ".join(found)


def split_words(own: str, other: str) -> str:
    """How something is split, and how `there`; empty where it is not."""
    if not other:
        return f"split by {own}; not split there"
    return f"split by {own}, not {other}" if own else f"not split; split by {other} there"
