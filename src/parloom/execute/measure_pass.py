"""Times of the operators of a forward pass where it runs them: each on what those before it made.

Between two uses of a small operator a pass reads weights, more than caches hold: in a loop of its
own the operator would find its code and its operands there, and take a part of the time. The views
that are made for an operator count as a part of it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parloom.cost.calibration import Timed, key_of
from parloom.cost.local_operators import local_operator
from parloom.errors import ParloomError
from parloom.execute.clock import WINDOWS, Clock
from parloom.execute.operands import (
    local_shape_of,
    not_measured,
    operator_call,
    random_operands,
    random_value,
)
from parloom.execute.stored import stored_values
from parloom.ir.ops import op_of
from parloom.ir.pcg import PCG, Compute, Movement, PCall, PFunction, PValue
from parloom.runtime import Context

# Of operands that steps have of their own; beyond that, calls of a function share them.
MOST_BYTES = 1 << 30
VIEW, ARRIVES = "view", "arrives"  # in the place of an operator's key


@dataclass(slots=True)
class _Step:
    """A call in a pass: its operands are values made before (`slots`, by position) or its own."""

    key: str
    call: Callable[..., Any]
    operands: list[Tensor | None]
    slots: tuple[tuple[int, int], ...]
    results: tuple[int | None, ...]
    item: Compute | None = None
    last_reads: tuple[int, ...] = ()

    def run(self, values: list[Tensor | None]) -> None:
        """Call it on what was made, and keep what it makes."""
        operands = list(self.operands)
        for position, slot in self.slots:
            operands[position] = values[slot]
        made = self.call(*operands)
        for place, tensor in zip(self.results, _tensors(made), strict=True):
            if place is not None:
                values[place] = tensor
        for slot in self.last_reads:
            values[slot] = None


def forward_pass_times(
    pcg: PCG, ctx: Context, clock: Clock, say: Callable[[str], None]
) -> Iterator[Timed]:
    """Each operator of a program without gradients once per local shape."""
    return _Pass(pcg, ctx, clock, say).timed()


class _Pass:
    """One rank's part of a program without gradients, made of its operators; what other ranks send
    is there, and what cannot be run alone is left out and said.
    """

    def __init__(self, pcg: PCG, ctx: Context, clock: Clock, say: Callable[[str], None]) -> None:
        self._pcg, self._ctx, self._clock, self._say = pcg, ctx, clock, say
        self._stored = stored_values(pcg)
        self._num_bytes = 0
        self._own: dict[int, list[dict[str, Tensor]]] = {}
        self._arrived: dict[tuple[tuple[int, ...], str], Tensor] = {}
        self._values: list[Tensor | None] = []
        self._steps: list[_Step] = []
        self._walk(pcg.main, {})
        self._drop()
        with torch.no_grad():
            self._steps = list(self._that_run())
        self._drop()

    def timed(self) -> Iterator[Timed]:
        """Each operator once per local shape: means over the passes of one window, which in all is
        the median of some. Of each operator the median would lose the pauses of a quota, which
        most windows of a short operator have none of.
        """
        calls = Counter(step.key for step in self._steps if step.key not in (VIEW, ARRIVES))
        if not calls:
            return
        least_s = self._clock.least_s / WINDOWS * len(calls)
        windows = [self._window(least_s) for _ in range(WINDOWS)]
        middle = sorted(windows, key=lambda window: sum(window.values()))[WINDOWS // 2]
        for key, count in calls.items():
            yield Timed(key, max(1e-9, middle[key] / count), 0.0)

    def _window(self, least_s: float) -> Mapping[str, float]:
        """Seconds of a pass by operator, the mean over so many as take `least_s`."""
        total, passes = defaultdict[str, float](float), 0
        while not passes or sum(total.values()) < least_s:
            for key, seconds in self._laps():
                total[key] += seconds
            passes += 1
        return {key: seconds / passes for key, seconds in total.items()}

    def _laps(self) -> Iterator[tuple[str, float]]:
        """Seconds of each operator of one pass."""
        clock, values = self._clock, self._values
        stamps = [clock.stamp()]
        timed = [step for step in self._steps if step.key != VIEW]
        with torch.no_grad():
            for step in self._steps:
                step.run(values)
                if step.key != VIEW:
                    stamps.append(clock.stamp())
        for step, begun, ended in zip(timed, stamps, stamps[1:], strict=False):
            if step.key != ARRIVES:
                yield step.key, clock.between(begun, ended)

    # Making it.

    def _walk(self, function: PFunction, slots: dict[str, int]) -> None:
        """Add the steps of a call of a function; `slots` are those of its values."""
        for item in function.body:
            if isinstance(item, PCall):
                called = self._pcg.by_name[item.function]
                pairs = zip(item.args, called.inputs, strict=True)
                inner = {own.name: slots[v.name] for v, own in pairs if v.name in slots}
                self._walk(called, inner)
                ends = zip(item.results, called.outputs, strict=True)
                slots |= {v.name: inner[own.name] for v, own in ends if own.name in inner}
            elif isinstance(item, Movement):
                self._arrive(item.result, slots)
            else:
                self._compute(item, self._stored.get(function.name, frozenset()), slots)

    def _arrive(self, value: PValue, slots: dict[str, int]) -> None:
        """What another rank sends has just been written; nothing of it is timed."""
        mesh = self._pcg.mesh
        key = local_shape_of(value, mesh), value.spec.dtype
        if key not in self._arrived:
            self._arrived[key] = random_value(value, (), mesh, self._clock.device)
        made = self._arrived[key]
        self._steps.append(_Step(ARRIVES, torch.clone, [made], (), self._new((value,), slots)))

    def _compute(self, item: Compute, stored: frozenset[str], slots: dict[str, int]) -> None:
        local = local_operator(item, self._pcg.mesh)
        if local.blocks.count > 1:
            self._say(f"not measured: {item.node.key}: its operands come in blocks")
            return
        values = {v.name: v for v in item.operands}
        given = {n: self._slot_of(v, stored, slots) for n, v in values.items()}
        own = self._operands(item, {n for n, slot in given.items() if slot is None})
        call, ctx = operator_call(self._pcg, item), self._ctx
        step = _Step(
            VIEW if op_of(item.node).view else key_of(local),
            lambda *operands: call(ctx, "", *operands),
            [own.get(name) for name in values],
            tuple((i, slot) for i, slot in enumerate(given.values()) if slot is not None),
            self._new(item.results, slots),
            item,
        )
        self._steps.append(step)

    def _slot_of(self, value: PValue, stored: frozenset[str], slots: dict[str, int]) -> int | None:
        """Where a number is that the pass makes; None of weights, and of indices, for which any of
        the shape will do.
        """
        return None if value.name in stored or not value.spec.is_float else slots.get(value.name)

    def _operands(self, item: Compute, names: set[str]) -> dict[str, Tensor]:
        """Of a call its own, where memory allows for it."""
        known = self._own.setdefault(id(item), [])
        if known and self._num_bytes > MOST_BYTES and known[0].keys() == names:
            known.append(known.pop(0))
            return known[-1]
        made = random_operands(item, self._pcg.mesh, self._clock.device, names)
        self._num_bytes += sum(tensor.nbytes for tensor in made.values())
        known.append(made)
        return made

    def _new(self, results: Sequence[PValue], slots: dict[str, int]) -> tuple[int | None, ...]:
        """Places for the numbers among results."""
        places = []
        for value in results:
            slot = None
            if value.spec.is_float:
                slot = slots[value.name] = len(self._values)
                self._values.append(None)
            places.append(slot)
        return tuple(places)

    def _that_run(self) -> Iterator[_Step]:
        """The steps that can be run alone. Those that read what others do not make, or make in
        another shape, have operands of their own.
        """
        for step in self._steps:
            try:
                self._settle(step)
                step.run(self._values)
            except (RuntimeError, IndexError, ParloomError) as error:
                if step.item is None:
                    raise
                self._say(not_measured(step.item, error))
            else:
                yield step

    def _settle(self, step: _Step) -> None:
        item, mesh = step.item, self._pcg.mesh
        if item is None:
            return
        values = list({v.name: v for v in item.operands}.values())
        found = []
        for position, slot in step.slots:
            value, made = values[position], self._values[slot]
            if made is not None and made.shape == local_shape_of(value, mesh):
                found.append((position, slot))
            else:
                step.operands[position] = self._operands(item, {value.name})[value.name]
        step.slots = tuple(found)

    def _drop(self) -> None:
        """No value lies in memory after the last step that reads it."""
        seen: set[int] = set()
        for step in reversed(self._steps):
            read = {slot for _, slot in step.slots} | {s for s in step.results if s is not None}
            step.last_reads = tuple(read - seen)
            seen |= read


def _tensors(made: Any) -> Sequence[Tensor]:
    return (made,) if isinstance(made, Tensor) else tuple(made)


def is_forward(pcg: PCG) -> bool:
    """Whether a program has no gradients."""
    functions = (pcg.main, *pcg.functions)
    items = (item for function in functions for item in function.body)
    computes = (item for item in items if isinstance(item, Compute))
    return not any(v.differentiable for item in computes for v in (*item.operands, *item.results))
