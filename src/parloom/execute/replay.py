"""Random draws of an eager run, recorded in their order and given to the captured program.

Both sides then compute from the same numbers, so a model that draws can be compared exactly. The
captured program draws from `rand` and `randn` alone (`capture.spelling`) and has masks of dropout;
while an eager run is recorded, torch's other distributions are made of the same two.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from parloom.capture import decompositions

aten = torch.ops.aten
MASK, RAND, RANDN = "mask", "rand", "randn"
BASE: Mapping[Any, str] = {aten.rand.default: RAND, aten.randn.default: RANDN}
# In place: the operator that makes the same as a new tensor, where its name is another one.
FUNCTIONAL = {"normal_": "normal_functional"}


class ReplayError(Exception):
    """The captured program draws in another order, or other shapes, than the eager run did."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Uniform or normal numbers, or a mask of zeros and ones."""

    kind: str
    values: Tensor


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is drawn inside of it, but while `paused`: a checkpoint draws twice."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []
        self._paused = False
        self._decompositions = decompositions()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Draws are made alike, and not recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        if func is aten.bernoulli_.float:
            return self._noted(MASK, func(*args, **given))
        if func is aten.native_dropout.default:
            result = func(*args, **given)
            self._noted(MASK, result[1])
            return result
        if func in BASE:
            return self._noted(BASE[func], func(*args, **given))
        schema = func._schema
        name = schema.name.partition("::")[2]
        in_place = schema.is_mutable
        packet = getattr(aten, FUNCTIONAL.get(name, name.removesuffix("_")), None)
        functional = getattr(packet, func._overloadname, None) if in_place else func
        made_of = self._decompositions.get(functional)
        if made_of is None:
            return func(*args, **given)
        with self:
            made = made_of(*args, **given)
        if made is NotImplemented:
            return func(*args, **given)
        return args[0].copy_(made) if in_place else made

    def _noted(self, kind: str, values: Tensor) -> Tensor:
        if not self._paused:
            self.draws.append(Draw(kind, values.detach().clone()))
        return values


class Replay:
    """Gives recorded draws to `reference.evaluate`, in their order."""

    def __init__(self, draws: list[Draw]) -> None:
        self._left = list(reversed(draws))

    @property
    def num_left(self) -> int:
        """Draws that nothing has asked for."""
        return len(self._left)

    def mask(self, key: str, shape: tuple[int, ...], p: float) -> Tensor:
        """Which elements a dropout of probability `p` keeps."""
        if not 0 < p < 1:  # torch then draws nothing
            return torch.full(shape, p <= 0)
        draw = self._next(key, shape)
        return draw.values != 0 if draw.kind == MASK else draw.values >= p

    def draw(self, key: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Tensor:
        """Numbers of one kind; raises `ReplayError` where others were drawn."""
        draw = self._next(key, shape)
        if draw.kind == MASK and kind == RAND:  # u < p wherever a one was drawn
            below_one = 1 - torch.finfo(dtype).eps
            return (draw.values == 0).to(dtype) * below_one
        if draw.kind != kind:
            raise ReplayError(f"{key} draws {kind}, and the module drew {draw.kind}")
        return draw.values.to(dtype)

    def _next(self, key: str, shape: tuple[int, ...]) -> Draw:
        if not self._left:
            raise ReplayError(f"{key} draws, and the module drew nothing more")
        found = tuple(self._left[-1].values.shape)
        if found != tuple(shape):
            raise ReplayError(f"{key} draws {list(shape)}, and the module drew {list(found)}")
        return self._left.pop()
