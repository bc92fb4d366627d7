"""Modules that do something else in the next call: a trace would repeat the first one for ever.

Forward and the loss function may draw from generators on the host, or keep something for the next
call, in anything that they can reach. Then they are traced again, with what the last call left in
its place, until a call leaves what it found. They may draw only if they seed, which shows in where
the generators end; they may keep something only if every trace computes the same. Numbers that
are counted, and lists that grow, are also tried far ahead.

Tensors that a trace leaves are put in place for the next one with their values where those are the
same in every call, as those of a mask are; others have no values then, and must not be read.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import Any

from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from parloom.capture.constants import fixed_values, same
from parloom.capture.left import (
    History,
    Left,
    host_generators,
    node_of,
    parts_of,
    put_back,
    terms_in,
    traced_tensors,
    was_read,
)
from parloom.capture.state.clocks import FILES, asked
from parloom.capture.state.far import MARKS, advance, ahead
from parloom.capture.state.numbers import Reads
from parloom.capture.state.paths import Path, Paths, State
from parloom.capture.state.reach import Reached
from parloom.capture.state.snapshot import Change, Snapshot, write
from parloom.errors import CaptureError

AHEAD_S = 100_000  # by which the clocks of a call are ahead of those of the one before
TRACES = 16  # of calls that find something else


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
        self.reads = Reads()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around the call: notes attributes that change, and generators with where they end."""
        before = Snapshot.of(self.model, self.loss)
        buffers = {name: (b, b._version) for name, b in self.model.named_buffers()}
        generators = host_generators(before)
        try:
            with asked(before, AHEAD_S * self.calls) as clocks:
                self.reads.active = True
                yield
            self.calls += 1
        except BaseException:
            after = Snapshot.of(self.model, self.loss)
            before.put(after.changes(before))
            raise
        finally:
            self.reads.active = False
        after = Snapshot.of(self.model, self.loss)
        # What is asked of the system is another answer every time.
        ends = host_generators(after) | {name: object() for name in clocks}
        drawn = frozenset(n for n, s in ends.items() if generators.get(n, s) != s) | clocks
        changed = after.changes(before)
        terms, counted = terms_in(after)
        terms_in(before)
        made = tuple(
            (module, name, tensor)
            for path, module in self.model.named_modules()
            for name, tensor in module._buffers.items()
            if tensor is not None and name not in before.parts[id(module), "weights"]
        )
        tensors = [*traced_tensors(after), *(t for _, _, t in made)] if changed or made else []
        values = self.values(tensors, buffers)
        self.left = Left(before, after, changed, made, values, drawn, ends, terms, counted)

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
        self.refuse_iterators(first)
        history = History(first)
        history.add(first)
        try:
            self.next_calls(history, program, again)
        finally:
            history.put_back()

    def undo(self) -> None:
        """Put back what the call changed."""
        if self.left is not None:
            put_back(self.left, self.left.changed)

    def next_calls(
        self, history: History, program: ExportedProgram, again: Callable[[], ExportedProgram]
    ) -> None:
        """Trace the calls to come, as far as they do not take paths that are known."""
        paths, left, far = Paths(), history.first, False
        state = history.state(left)
        lefts = {state.rest: left}
        for _ in range(TRACES):
            found = paths.unknown(state)
            if found is None:
                break
            state, skipped = found
            far = far or skipped > 0
            reads = self.follow(history, lefts[state.rest], state, (program, again), far)
            assert self.left is not None
            left = self.left
            history.add(left)
            after = history.state(left)
            paths.known.append(Path(state, reads, history.terms(left, after), after.rest))
            lefts[after.rest] = left
            state = after
        else:
            raise self.too_many(left)
        if not history.restless:
            return
        for calls in MARKS:
            unread = history.put(left, state.values, None)
            for key, parts, content in ahead(left.before, left.after, left.changed, calls):
                held, now = left.after.held[key], left.after.parts[key]
                restless = history.restless_parts(held, parts)
                if restless is not None:
                    write(replace(held.aspect, content=content), {**now, **restless})
            for (_, style), held in left.changed.items():
                if style == "iterator":
                    advance(held.owner, calls)
            self.compare(left, program, self.traced(left, again, unread, True), unread, True)

    def follow(
        self,
        history: History,
        left: Left,
        state: State,
        programs: tuple[ExportedProgram, Callable[[], ExportedProgram]],
        far: bool,
    ) -> Reads:
        """Trace the call that finds a state; what it reads of the numbers in it."""
        program, again = programs
        self.reads = reads = Reads()
        unread = history.put(left, state.values, reads)
        try:
            found = again()
        except Exception:  # also C code that takes no other class of numbers
            unread = history.put(left, state.values, None)
            self.reads = Reads()
            reads = Reads([(itemgetter(n), value) for n, value in state.values.items()])
            found = self.traced(left, again, unread, far)
        self.compare(left, program, found, unread, far)
        return reads

    def traced(
        self,
        left: Left,
        again: Callable[[], ExportedProgram],
        unread: Mapping[int, Change],
        far: bool,
    ) -> ExportedProgram:
        """The next call; one that raises an error is no repetition of the first one."""
        try:
            return again()
        except Exception as err:
            raise self.refusal(left, list(unread.values()), far) from err

    def compare(
        self,
        left: Left,
        program: ExportedProgram,
        found: ExportedProgram,
        unread: Mapping[int, Change],
        far: bool,
    ) -> None:
        """Raise `CaptureError` unless the next call gives the same program.

        `unread` are tensors without values, which it must not read.
        """
        if self.left is not None:
            self.refuse_draws(left, self.left)
        held = {id(t) for t in found.constants.values()}
        read = [change for key, change in unread.items() if key in held]
        if read or not same(program, found):
            raise self.refusal(left, read, far)

    def too_many(self, left: Left) -> CaptureError:
        """The error for state of which too many values make a difference to the code."""
        where, what = next(self.named(*part) for part in parts_of(left))
        who = "the loss function" if what.startswith("loss") else "forward"
        return CaptureError(
            f"cannot capture {where}: {who} changes {what} and then reads another value of it in"
            f" each of {TRACES} calls, so that nothing proves that all calls compute the same; read"
            " it in comparisons alone, keep it in a buffer (register_buffer), or decide outside of"
            " forward"
        )

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

    def named(self, held: Reached, part: Any) -> tuple[str, str]:
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
        """Raise `CaptureError` for what a call changed that cannot be put back."""
        for (_, style), held in left.changed.items():
            where, what = self.named(held, "")
            if (style == "iterator" and left.before.copy_of(held) is None) or was_read(left, held):
                raise CaptureError(
                    f"cannot capture {where}: forward advances the iterator {what}, and every step"
                    " of a plan would repeat what it gave while it was captured; give what it gives"
                    " in the batch, or count in a buffer (register_buffer)"
                )
            if style in ("array", "tensor") and held.aspect.content is None:
                raise CaptureError(
                    f"cannot capture {where}: forward writes to {what}, which is too large to be"
                    " put back after the capture; keep it in a buffer (register_buffer)"
                )

    def refuse_draws(self, first: Left, second: Left) -> None:
        """Raise `CaptureError` for generators that do not end where they ended before."""
        free = sorted(
            name
            for name in first.drawn
            if not name.startswith(("time.", "datetime."))
            and second.ends.get(name) != first.ends[name]
            and (name not in FILES or name in second.drawn)
        )
        if free:
            raise CaptureError(
                f"cannot capture {type(self.model).__name__}: forward draws from"
                f" {' and '.join(free)}, and every step of a plan would repeat what it drew while"
                " it was captured; draw in the data loader and give the result in the batch, draw"
                " with torch.rand, or switch it off (layer drop, masking)"
            )
