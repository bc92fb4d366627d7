"""Plays a step: operators inside each distinct action once, then actions one after the other.

What a segment does depends on its instructions and on the transfers under way when it begins, and
on nothing else; time is whole picoseconds, so when it begins does not matter. A `Simulator`
remembers all it has played. A step with one edited operator plays that operator's segment, and
those after it until the transfers under way are again what they were (delta simulation).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from parloom.cost.actions import StageWriter
from parloom.cost.engine import Engine, Outcome, Run, State
from parloom.cost.kernels import Kernels
from parloom.cost.step import priced
from parloom.cost.tasks import (
    COMPONENTS,
    COMPUTE,
    Action,
    Changes,
    Load,
    Placed,
    Segment,
    StepTasks,
    kind_of,
    loads,
)
from parloom.cost.timeline import Memory, Piece, Played, Process, Span, Timeline
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, Optimizer

Amounts = tuple[tuple[str, int], ...]
What = TypeVar("What", str, str | int)


def simulate(
    pcg: PCG,
    cluster: Cluster,
    decisions: Decisions,
    optimizer: Optimizer | None = None,
    kernels: Kernels | None = None,
) -> Timeline:
    """Play one step of `pcg`, which was lowered from `decisions`, on `cluster`; see `priced`."""
    return Simulator().play(step_tasks(pcg, cluster, decisions, optimizer, kernels))


def step_tasks(
    pcg: PCG,
    cluster: Cluster,
    decisions: Decisions,
    optimizer: Optimizer | None = None,
    kernels: Kernels | None = None,
) -> StepTasks:
    """The instructions of one step of a plan of one stage; see `priced`."""
    found = priced(pcg, cluster, decisions, optimizer, kernels)
    return StageWriter(pcg, cluster, found).tasks()


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment played from a state; its transfers have placeholders for names."""

    outcome: Outcome
    busy: Amounts
    exposed: Amounts


class Simulator:
    """Plays steps; what it has played before it knows."""

    def __init__(self) -> None:
        self._segments: dict[tuple[Segment, State, tuple[int, ...]], _Segment] = {}
        self._actions: dict[tuple[Action, State, tuple[int, ...]], Played] = {}
        self._memories: dict[Segment, Memory] = {}
        self._loads: dict[Segment, Load] = {}

    def play(self, tasks: StepTasks) -> Timeline:
        """Play a step from its first action to its last."""
        now, state = 0, State()
        spans = []
        for action in tasks.actions:
            played = self.action(action, state, tasks.capacities)
            spans.append(Span(now, action.name, played))
            now, state = now + played.ps, played.state
        process = Process("", tuple(spans), tasks.base)
        return Timeline(now, (process,), _bound_ps(spans, tasks.capacities))

    def action(self, action: Action, state: State, capacities: tuple[int, ...]) -> Played:
        """Play an action while the transfers of `state` are under way."""
        key = action, state, capacities
        known = self._actions.get(key)
        if known is None:
            known = self._actions[key] = self._action(action, state, capacities)
        return known

    def _action(self, action: Action, state: State, capacities: tuple[int, ...]) -> Played:
        now = 0
        memory = Memory()
        busy: dict[str, int] = {}
        exposed: dict[str, int] = {}
        load: dict[str | int, int] = {}
        pieces = []
        _add(load, loads(state, capacities))
        for placed in action.parts:
            found, names, state = self._segment(placed, state, capacities)
            pieces.append(Piece(now, placed, found.outcome, names))
            now += found.outcome.end_ps
            _add(busy, found.busy)
            _add(exposed, found.exposed)
            _add(load, self._load(placed.segment, capacities))
            memory = memory.then(self._memory(placed.segment))
        _add(load, ((what, -left) for what, left in loads(state, capacities)))
        return Played(
            now,
            state,
            tuple(busy.items()),
            tuple(exposed.items()),
            memory,
            tuple(pieces),
            tuple(load.items()),
        )

    def _segment(
        self, placed: Placed, state: State, capacities: tuple[int, ...]
    ) -> tuple[_Segment, Mapping[str, str], State]:
        """The segment played, what its placeholders stand for, and what is under way after it."""
        names = {stand_in: key for key, stand_in in placed.keys}
        if state:
            stand_ins = dict(placed.keys)
            for index, launch in enumerate(state):
                if launch.key not in stand_ins:
                    stand_in = f"{kind_of(launch.key)}|@{index}"
                    stand_ins[launch.key], names[stand_in] = stand_in, launch.key
            state = _renamed(state, stand_ins)
        key = placed.segment, state, capacities
        known = self._segments.get(key)
        if known is None:
            known = self._segments[key] = _play(placed.segment, state, capacities)
        after = known.outcome.state
        return known, names, _renamed(after, names) if after else after

    def _load(self, segment: Segment, capacities: tuple[int, ...]) -> Load:
        known = self._loads.get(segment)
        if known is None:
            total: dict[str | int, int] = {}
            _add(total, loads(segment.instructions, capacities))
            known = self._loads[segment] = tuple(total.items())
        return known

    def _memory(self, segment: Segment) -> Memory:
        known = self._memories.get(segment)
        if known is None:
            known = self._memories[segment] = _memory(segment)
        return known


def _play(segment: Segment, state: State, capacities: tuple[int, ...]) -> _Segment:
    # What others launched and is not under way any more is over.
    over = segment.awaited - {launch.key for launch in state}
    outcome = Engine([segment.instructions], capacities, state, over).play()
    busy = {COMPUTE: sum(i.ps for i in segment.instructions if isinstance(i, Run))}
    busy[COMPUTE] += sum(ps for _, ps in outcome.slowed[0])
    for moved in outcome.moved:
        busy[moved.channel] = busy.get(moved.channel, 0) + moved.end_ps - moved.start_ps
    exposed: dict[str, int] = {}
    for _, key, ps in outcome.waited[0]:
        exposed[kind_of(key)] = exposed.get(kind_of(key), 0) + ps
    return _Segment(outcome, tuple(busy.items()), tuple(exposed.items()))


def _bound_ps(spans: Iterable[Span], capacities: tuple[int, ...]) -> int:
    """What no overlap can beat: the most that compute, a channel or a link has to do."""
    totals: dict[str | int, int] = {}
    for span in spans:
        _add(totals, span.played.load)
    done = (n // capacities[what] if isinstance(what, int) else n for what, n in totals.items())
    return max(done, default=0)


def _memory(segment: Segment) -> Memory:
    """Memory changes in the order of the program, whatever the times."""
    held, peaks = [0] * len(COMPONENTS), [0] * len(COMPONENTS)
    total = peak = 0
    at_peak = tuple(held)
    changes: Changes
    for note in segment.notes:
        for changes in (note.before, note.after):
            for component, size in changes:
                held[component] += size
                total += size
                peaks[component] = max(peaks[component], held[component])
            if total > peak:
                peak, at_peak = total, tuple(held)
    return Memory(tuple(held), tuple(peaks), peak, at_peak)


def _renamed(state: State, names: Mapping[str, str]) -> State:
    return tuple(replace(t, key=names.get(t.key, t.key)) for t in state)


def _add(totals: dict[What, int], amounts: Iterable[tuple[What, int]]) -> None:
    for name, amount in amounts:
        totals[name] = totals.get(name, 0) + amount
