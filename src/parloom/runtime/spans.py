"""When the actions of a step ran, and how long they waited for other ranks."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch

Instant = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """An action of one rank, or the prologue of one of its stages (`P`, `2P`), in seconds after the
    beginning of the step; `waited_s` of them it waited for other ranks: passes for messages of
    other stages, REDUCE and GATHER for weights that stages share, STEP until all gradients are
    known.
    """

    action: str
    begin_s: float
    end_s: float
    waited_s: float = 0.0


def named(name: str) -> AbstractContextManager[object]:
    """A range of that name in profiles: a plan's name, beside torch's own.

    `torch.autograd.profiler.emit_nvtx` shows it in Nsight Systems, too.
    """
    # Without a profiler it would cost some microseconds a call.
    if torch.compiler.is_compiling() or not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(name)


def waiting_share(spans: Sequence[ActionSpan]) -> float:
    """The share of a step in which a rank waited for other stages.

    Without what STEP waits: only steps that clip gradients or scale the loss have that, which no
    prediction knows.
    """
    waited_s = sum(span.waited_s for span in spans if span.action != "STEP")
    return waited_s / spans[-1].end_s


class Spans:
    """Notes one step: on a GPU by events on its current stream, elsewhere by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._actions: list[tuple[str, Instant, Instant, list[tuple[Instant, Instant]]]] = []
        self._waits: list[tuple[Instant, Instant]] = []
        self._began = self._now()

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """An action runs."""
        self._waits = []
        began = self._now()
        yield
        self._actions.append((name, began, self._now(), self._waits))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The action waits for other ranks."""
        began = self._now()
        yield
        self._waits.append((began, self._now()))

    def read(self) -> tuple[ActionSpan, ...]:
        """All actions, in their order; waits for the device."""
        return tuple(
            ActionSpan(
                name,
                _seconds(self._began, begin),
                _seconds(self._began, end),
                sum(_seconds(*wait) for wait in waits),
            )
            for name, begin, end, waits in self._actions
        )

    def _now(self) -> Instant:
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def action_of(spans: Spans | None, name: str) -> AbstractContextManager[None]:
    """Note an action, where the step is observed."""
    return nullcontext() if spans is None else spans.action(name)


def waiting_of(spans: Spans | None) -> AbstractContextManager[None]:
    """Note a wait, where the step is observed."""
    return nullcontext() if spans is None else spans.waiting()


def _seconds(begin: Instant, end: Instant) -> float:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    assert isinstance(end, float)
    return end - begin
