"""Modules that do something else in the next call: a trace would repeat the first one for ever.

Forward and the loss function may draw from generators on the host, or keep something for the next
call, in anything that they can reach. Then they are traced again, with what the last call left in
its place, until a call leaves what it found. They may draw only if they seed, which shows in where
the generators end; they may keep something only if every trace computes the same. Numbers that
are counted, and lists that grow, are also tried far ahead.

Tensors that a trace leaves are put in place for the next one with their values where those are the
same in every call, as those of a mask are; others have no values then, and must not be read.
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from parloom.capture.clocks import asked
from parloom.capture.constants import fixed_values, same
from parloom.capture.far import advance, ahead, distances
from parloom.capture.reach import Held
from parloom.capture.state import Change, Key, Snapshot, write
from parloom.errors import CaptureError

AHEAD_S = 100_000  # by which the clocks of a call are ahead of those of the one before
CALLS = 4  # that are traced one after the other at most


@dataclass(frozen=True, slots=True)
class Left:
    """What a call left: the state before and after it, and the tensors in it that it made.

    `made` are buffers that it registered, which go again; `values` are those of tensors, by
    identity, that are the same in every call.
    """

    before: Snapshot
    after: Snapshot
    changed: Mapping[Key, Held]
    made: tuple[tuple[nn.Module, str, Tensor], ...]
    values: Mapping[int, Tensor]
    drawn: frozenset[str]
    ends: Mapping[str, object]

    @property
    def is_clean(self) -> bool:
        """Whether the next call finds what this one found."""
        return not self.changed and not self.drawn and not self.made


class Watch:
    """What one call of a model's forward and of the loss function changes.

    Outside of its parameters and buffers.
    """

    def __init__(self, model: nn.Module, loss: object = None) -> None:
        self.model = model
        self.loss = loss
        self.buffers = dict(model.named_buffers())
        self.left: Left | None = None
        self.calls = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around the call: notes attributes that change, and generators with where they end."""
        before = Snapshot.of(self.model, self.loss)
        buffers = {name: (b, b._version) for name, b in self.model.named_buffers()}
        generators = host_generators(before)
        files = [held.owner for (_, style), held in before.held.items() if style == "global"]
        try:
            with asked(files, AHEAD_S * self.calls) as clocks:
                yield
            self.calls += 1
        except BaseException:
            after = Snapshot.of(self.model, self.loss)
            before.put(after.changes(before))
            raise
        after = Snapshot.of(self.model, self.loss)
        # What is asked of the system is another answer every time.
        ends = host_generators(after) | {name: object() for name in clocks}
        drawn = frozenset(n for n, s in ends.items() if generators.get(n, s) != s) | clocks
        changed = after.changes(before)
        made = tuple(
            (module, name, tensor)
            for path, module in self.model.named_modules()
            for name, tensor in module._buffers.items()
            if tensor is not None and name not in before.parts[id(module), "weights"]
        )
        tensors = [*traced_tensors(after), *(t for _, _, t in made)] if changed or made else []
        values = self.values(tensors, buffers)
        self.left = Left(before, after, changed, made, values, drawn, ends)

    def values(
        self, left: list[Tensor], buffers: Mapping[str, tuple[Tensor, int]]
    ) -> dict[int, Tensor]:
        """Values of the tensors that the trace made and left, where every call gives the same.

        `buffers` are those at the beginning, with their versions: one that is written is not fixed.
        """
        mode: Any = get_proxy_mode()
        if mode is None or not left:
            return {}
        given: dict[fx.Node, Tensor] = {}
        now = dict(self.model.named_buffers())
        for name, (buffer, version) in buffers.items():
            node = node_of(buffer, mode.tracer)
            unwritten = now.get(name) is buffer and buffer._version == version
            if node is not None and unwritten and name in self.buffers:
                given[node] = self.buffers[name]
        fixed = fixed_values(mode.tracer.graph, mode.tracer.root, given)
        nodes = {id(tensor): node_of(tensor, mode.tracer) for tensor in left}
        return {key: fixed[node] for key, node in nodes.items() if node in fixed}

    def check(self, program: ExportedProgram, again: Callable[[], ExportedProgram]) -> None:
        """Raise `CaptureError` if `again`, which calls the model once more, gives another one.

        The state is then as before the first call.
        """
        first = self.left
        if first is None or first.is_clean:
            return
        touched: dict[Key, Held] = dict(first.changed)
        self.refuse_iterators(first)
        try:
            self.next_calls(first, program, again, touched)
        finally:
            put_back(first, touched)

    def undo(self) -> None:
        """Put back what the call changed."""
        if self.left is not None:
            put_back(self.left, self.left.changed)

    def next_calls(
        self,
        first: Left,
        program: ExportedProgram,
        again: Callable[[], ExportedProgram],
        touched: dict[Key, Held],
    ) -> None:
        """Trace the next calls, until one leaves what it found or only goes on counting."""
        left = first
        for _ in range(2, CALLS + 1):
            self.compare(left, program, again, put_for_next(left), far=False)
            assert self.left is not None
            left = self.left
            touched |= left.changed
            if not left.changed and not left.made:
                return
        for calls in distances(left.before, left.after, left.changed):
            unread = put_for_next(left)
            for key, parts, content in ahead(left.before, left.after, left.changed, calls):
                write(replace(left.after.held[key].aspect, content=content), parts)
            for (_, style), held in left.changed.items():
                if style == "iterator":
                    advance(held.owner, calls)
            self.compare(left, program, again, unread, far=True)

    def compare(
        self,
        left: Left,
        program: ExportedProgram,
        again: Callable[[], ExportedProgram],
        unread: Mapping[int, Change],
        far: bool,
    ) -> None:
        """Raise `CaptureError` unless the next call gives the same program.

        `unread` are tensors without values, which it must not read.
        """
        try:
            found = again()
        except Exception as err:
            if far and not unread:
                return  # the program ends there, and says so
            raise self.refusal(left, list(unread.values()), far) from err
        if self.left is not None:
            self.refuse_draws(left, self.left)
        held = {id(t) for t in found.constants.values()}
        read = [change for key, change in unread.items() if key in held]
        if read or not same(program, found):
            raise self.refusal(left, read, far)

    def refusal(self, left: Left, read: Collection[Change], far: bool) -> CaptureError:
        """The error for state that changes the program: what is read, or all that changed."""
        names = sorted({self.named(*part) for part in read or parts_of(left)})
        if not names:
            return CaptureError(
                f"cannot capture {type(self.model).__name__}: the next call does something else,"
                f" and all that it has asked is {', '.join(sorted(left.drawn)) or 'unknown'};"
                " decide by clocks, files and the environment outside of forward"
            )
        where = names[0][0]
        what = ", ".join(name for place, name in names[:3] if place == where)
        who = "the loss function" if what.startswith("loss") else "forward"
        return CaptureError(
            f"cannot capture {where}: {who} changes {what} and then does something else in"
            f" {'a later' if far else 'the next'} call; keep such state in a buffer"
            " (register_buffer) or decide outside of forward"
        )

    def named(self, held: Held, part: Any) -> tuple[str, str]:
        """Where a part is, `Net.inner`, and how it is called there, `self.calls`."""
        model = type(self.model).__name__
        held, part = held.attribute(part)
        label = held.label(part)
        paths = {id(m): path for path, m in self.model.named_modules()}
        if held.aspect.style == "attributes" and id(held.owner) in paths:
            path = paths[id(held.owner)]
            return ".".join(p for p in (model, path) if p), f"self.{part}"
        return model, label

    def refuse_iterators(self, left: Left) -> None:
        """Raise `CaptureError` for an iterator that was advanced and cannot be put back."""
        for (_, style), held in left.changed.items():
            if style == "iterator" and left.before.copy_of(held) is None:
                where, what = self.named(held, "")
                raise CaptureError(
                    f"cannot capture {where}: forward advances the iterator {what}, and every step"
                    " of a plan would repeat what it gave while it was captured; give what it gives"
                    " in the batch, or count in a buffer (register_buffer)"
                )

    def refuse_draws(self, first: Left, second: Left) -> None:
        """Raise `CaptureError` for generators that do not end where they ended before."""
        free = sorted(
            name
            for name in first.drawn
            if not name.startswith("time.") and second.ends.get(name) != first.ends[name]
        )
        if free:
            raise CaptureError(
                f"cannot capture {type(self.model).__name__}: forward draws from"
                f" {' and '.join(free)}, and every step of a plan would repeat what it drew while"
                " it was captured; draw in the data loader and give the result in the batch, draw"
                " with torch.rand, or switch it off (layer drop, masking)"
            )


def parts_of(left: Left) -> Iterator[Change]:
    """All parts that a call changed."""
    for key in left.changed:
        for part in left.after.changed_parts(left.before, key):
            yield left.after.held[key], part
    for module, name, _ in left.made:
        yield left.after.held[id(module), "attributes"], name


def put_for_next(left: Left) -> dict[int, Change]:
    """Put what a call left in place for the next one; the tensors that got no values.

    Those are on the meta device: nothing can be computed of them together with others.
    """
    left.after.put(left.changed)
    known = {id(t) for t in traced_tensors(left.before)}
    empty: dict[int, Change] = {}
    kept: dict[int, Tensor] = {}

    def real(value: Any, held: Held, part: Any) -> Any:
        if isinstance(value, tuple):
            made = [real(v, held, part) for v in value]
            if all(m is v for m, v in zip(made, value, strict=True)):
                return value
            return type(value)(made) if type(value) is tuple else type(value)(*made)
        if not isinstance(value, FakeTensor) or id(value) in known:
            return value
        if id(value) not in kept:
            found = left.values.get(id(value))
            sizes = [int(n) for n in value.shape]
            made_ = torch.zeros(sizes, dtype=value.dtype, device="meta")
            kept[id(value)] = made_ if found is None else found.to(value.device)
            if found is None:
                empty[id(made_)] = held, part
        return kept[id(value)]

    for key, held in left.after.held.items():
        if key in left.before.held and key not in left.changed:
            continue
        parts = left.after.parts[key]
        now = {name: real(value, held, name) for name, value in parts.items()}
        if any(now[name] is not value for name, value in parts.items()):
            write(held.aspect, now)
    for module, name, tensor in left.made:
        held = left.after.held[id(module), "attributes"]
        module._buffers[name] = real(tensor, held, name)
    return empty


def put_back(first: Left, touched: Mapping[Key, Held]) -> None:
    """Make everything as it was before the first call."""
    first.before.put(touched)
    for module, name, _ in first.made:
        module._buffers.pop(name, None)
    for (_, style), held in touched.items():
        if style == "iterator":
            first.before.put_copy(held)


def traced_tensors(state: Snapshot) -> Iterator[Tensor]:
    """Tensors that a trace made, outside of parameters and buffers."""
    for key, parts in state.parts.items():
        if key[1] != "weights":
            yield from (v for v in parts.values() if isinstance(v, FakeTensor))


def node_of(tensor: Tensor, tracer: Any) -> fx.Node | None:
    """The node of a trace that made a tensor."""
    found: Any = get_proxy_slot(tensor, tracer, None)
    return None if found is None else found.proxy.node


def host_generators(state: Snapshot) -> dict[str, object]:
    """The states of the generators that Python code draws from: global ones, and all in reach."""
    numpy_state: Any = numpy.random.get_state(legacy=False)
    found: dict[str, object] = {"random": random.getstate(), "numpy.random": repr(numpy_state)}
    for (_, style), held in state.held.items():
        if style == "draws":
            found[held.found] = held.aspect.fixed
    return found
