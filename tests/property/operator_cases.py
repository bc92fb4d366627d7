"""Example calls of every operator in the registry, as data for `test_operators`.

Sizes are products of 2 and 3 so that axes of both sizes, alone and jointly, find a factor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor argument; `kind` says how values are drawn, `role` how it enters the program."""

    shape: Shape
    kind: str = "normal"
    high: int = 0
    role: str = "parameter"
    dtype: str = "float64"

    @property
    def is_complex(self) -> bool:
        """Whether it is given as pairs of real numbers."""
        return self.dtype.startswith("complex")

    def draw(self, generator: torch.Generator) -> Tensor:
        if self.kind == "index":
            return torch.randint(0, self.high, self.shape, generator=generator)
        if self.kind == "pivots":  # rows that are exchanged with themselves or later ones
            rows = torch.arange(1, self.high + 1)
            drawn = rows + (torch.rand(self.shape, generator=generator) * (self.high + 1 - rows))
            return drawn.to(torch.int32)
        if self.dtype == "int64":
            return self._indices(generator)
        if self.dtype == "bool":
            drawn = torch.rand(self.shape, generator=generator) < 0.6
            hidden = {"blind": -2, "unseen": 1}.get(self.kind)  # the dim whose second is all False
            return drawn if hidden is None else drawn.index_fill(hidden, torch.tensor(1), False)
        shape = (*self.shape, 2) if self.is_complex else self.shape
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        change: dict[str, Callable[[Tensor], Tensor]] = {
            "positive": lambda x: x.abs() + 0.5,
            "unit": lambda x: x.sigmoid() * 0.9 + 0.05,
            "far": lambda x: x + 30.0,  # a mean that a low precision cannot subtract
            "ties": lambda x: x.round() + 0.25,  # every value many times, none of them at a kink
            "rounded": torch.round,
            "infinite": lambda x: x.masked_fill(x > 1.5, float("inf")),
            "zeros": lambda x: x * (torch.arange(len(x)) % 2).view(-1, *[1] * (x.dim() - 1)),
            "spd": lambda x: x @ x.mT + x.shape[-1] * torch.eye(x.shape[-1], dtype=x.dtype),
            "sorted": lambda x: x.sort().values,
        }
        drawn = change.get(self.kind, torch.clone)(drawn)
        return drawn if self.is_complex else drawn.to(getattr(torch, self.dtype))

    def _indices(self, generator: torch.Generator) -> Tensor:
        """Integers with a meaning: different ones, rows of them, from the end, starts of bags."""
        if self.kind == "ends":  # where groups of rows end
            drawn = torch.randint(0, self.high + 1, self.shape, generator=generator).sort().values
            return torch.cat([drawn[1:], torch.tensor([self.high])])
        if self.kind == "negative":
            return torch.randint(-self.high, self.high, self.shape, generator=generator)
        rows = [torch.randperm(self.high, generator=generator) for _ in range(self.shape[0])]
        if self.kind == "order":
            return torch.stack(rows)
        if self.kind == "distinct":
            return rows[0][: self.shape[0]]
        starts = rows[0][: self.shape[0]].sort().values
        starts[0] = 0
        if self.kind == "starts_and_end":
            starts[-1] = self.high
        return starts


@dataclass(frozen=True, eq=False)
class Case:
    """One call: `args` and `kwargs` as in a graph node, with `Operand`s where tensors stand.

    `oracle` replaces ATen's operator as the reference; `parts` cut factors further; `updates` names
    the results that are new values of the buffers among the operands; `tolerance` is not the
    gate's where a case is about float32.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    label: str = ""
    oracle: Callable[..., Any] | None = None
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    updates: tuple[int, ...] = ()
    tolerance: float = 1e-9

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}" if self.label else self.op


def real(*shape: int) -> Operand:
    return Operand(shape)


def positive(*shape: int) -> Operand:
    return Operand(shape, "positive")


def unit(*shape: int) -> Operand:
    return Operand(shape, "unit")


def fixed(*shape: int) -> Operand:
    """A real tensor that is not trained."""
    return Operand(shape, role="batch")


def index(high: int, *shape: int) -> Operand:
    return Operand(shape, "index", high, "batch", "int64")


def flag(*shape: int) -> Operand:
    return Operand(shape, "bool", 0, "batch", "bool")


def buffer(*shape: int) -> Operand:
    return Operand(shape, "positive", role="buffer")


def single(*shape: int) -> Operand:
    return Operand(shape, dtype="float32")


def pairs(*shape: int) -> Operand:
    """Complex numbers."""
    return Operand(shape, dtype="complex128")


def matrices(*shape: int) -> Operand:
    """Symmetric positive matrices."""
    return Operand(shape, "spd")


def case(op: str, *args: Any, label: str = "", **kwargs: Any) -> Case:
    return Case(op, args, tuple(kwargs.items()), label)


def each(names: str, *args: Any, label: str = "", **kwargs: Any) -> list[Case]:
    return [case(name, *args, label=label, **kwargs) for name in names.split()]
