"""Where the time of a simulated step goes: every picosecond has one cause.

The compute stream of a device computes or waits, and never does anything else. So a step is the sum
of what it computes and of what it waits for, and two steps differ by the sum of what differs in
these. What is sent beside computing is counted as well: it keeps links busy, and costs no time.
The devices of a pipeline do different things: its step is the mean over all of them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parloom.cost.engine import Launch, Run
from parloom.cost.tasks import (
    COMPONENTS,
    OF_WEIGHTS,
    RECOMPUTED,
    RECOMPUTING,
    SHARES,
    Changes,
    Note,
    kind_of,
)
from parloom.cost.timeline import MESSAGES, NORM, Piece, Played, Span, Timeline
from parloom.ir.mesh import Cluster
from parloom.ir.pcg import PCG, PCall

# What the compute stream does.
COMPUTING, AGAIN, COPYING = "computing", "recomputation", "copies of movements"
UPDATING, ADDING, WAITING = "optimizer update", "adding up microbatches", "waiting"
ISSUING = "processor issues kernels"
BESIDE = "slower beside collectives"
MARKS = (RECOMPUTING, RECOMPUTED)
MAIN, STEP, BETWEEN = "main", "step program", "between stages"
# What a device of a pipeline waits for between actions, and when all it has is done.
WAITS = {MESSAGES: "messages of other stages", NORM: "gradients of all stages"}
SLOWEST = "the slowest stage"
UPDATE = ("REDUCE", "STEP", "GATHER")
OWN_KINDS = {"update": UPDATING, "collect": ADDING, "issue": ISSUING}
HOST = ("to host", "from host")


@dataclass(frozen=True, slots=True, order=True)
class Cause:
    """What the compute stream does; of WAITING, for which kind of transfer (`activations
    all_reduce`) and for which level of the topology, the one that keeps it longest.
    """

    what: str
    transfer: str = ""
    level: str = ""


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """Transfers of one kind over the same axes, launched in the same `place`."""

    place: str
    transfer: str
    axes: str
    level: str


@dataclass(frozen=True, slots=True)
class Sent:
    """What a group of transfers comes to in a step: bytes that a device sends over their level, ps
    that they take one after the other, and ps that are waited for.
    """

    group: Group
    count: int
    num_bytes: int
    ps: int
    waited_ps: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The instant at which most is held: bytes by component, and what runs then and where."""

    held: tuple[int, ...]
    action: str
    prefix: str
    name: str

    @property
    def num_bytes(self) -> int:
        return sum(self.held)


@dataclass(frozen=True, slots=True)
class Ledger:
    """A step of one device.

    `time` is ps by place (block kind, MAIN or STEP) and cause; its sum is `step_ps`. `busy` is ps
    that the compute stream and the links of each level are busy, whatever is waited for.
    """

    step_ps: int
    time: Mapping[tuple[str, Cause], int]
    sent: tuple[Sent, ...]
    busy: Mapping[str, int]
    peak: Peak

    def by_cause(self) -> Counter[Cause]:
        """All places together."""
        found: Counter[Cause] = Counter()
        for (_, cause), ps in self.time.items():
            found[cause] += ps
        return found

    def by_place(self) -> Counter[str]:
        """All causes together."""
        found: Counter[str] = Counter()
        for (place, _), ps in self.time.items():
            found[place] += ps
        return found


@dataclass(frozen=True, slots=True)
class Program:
    """What a process of a timeline runs: the program of `stage`, on its part of the cluster."""

    pcg: PCG
    cluster: Cluster
    stage: int = 0


def ledger(timeline: Timeline, pcg: PCG, cluster: Cluster) -> Ledger:
    """Read `timeline`, a step of `pcg` on `cluster`, as causes."""
    return pipeline_ledger(timeline, [(1, (Program(pcg, cluster),))])


def pipeline_ledger(
    timeline: Timeline, processes: Sequence[tuple[int, Sequence[Program]]]
) -> Ledger:
    """The mean over all devices: of each process how many it stands for, and the programs of its
    stages. The peak is that of the device that holds most.
    """
    read = [_Reading(timeline, i, own) for i, (_, own) in enumerate(processes)]
    found = _mean([reading.run() for reading in read], [count for count, _ in processes])
    sent = tuple(
        Sent(group, count, found.num_bytes[group], found.ps[group], found.waited[group])
        for group, count in found.count.items()
    )
    peak = max((reading.peak() for reading in read), key=lambda peak: peak.num_bytes)
    return Ledger(timeline.step_ps, found.time, sent, found.busy, peak)


@dataclass(slots=True)
class _Amounts:
    """What one action, or a step, comes to."""

    time: Counter[tuple[str, Cause]]
    busy: Counter[str]
    count: Counter[Group]
    num_bytes: Counter[Group]
    ps: Counter[Group]
    waited: Counter[Group]

    @classmethod
    def none(cls) -> "_Amounts":
        return cls(*(Counter() for _ in range(6)))

    @property
    def counters(self) -> tuple[Counter[Any], ...]:
        return self.time, self.busy, self.count, self.num_bytes, self.ps, self.waited

    def add(self, other: "_Amounts") -> None:
        for own, more in zip(self.counters, other.counters, strict=True):
            own.update(more)


def _mean(amounts: Sequence[_Amounts], devices: Sequence[int]) -> _Amounts:
    """Of so many devices each; the times of a step still add up to it, to the picosecond."""
    if len(amounts) == 1:
        return amounts[0]
    total = sum(devices)
    found = []
    for each in zip(*(own.counters for own in amounts), strict=True):
        added: Counter[Any] = Counter()
        for own, count in zip(each, devices, strict=True):
            added.update({key: count * value for key, value in own.items()})
        found.append(Counter({key: value // total for key, value in added.items()}))
    mean = _Amounts(*found)
    step_ps = sum(amounts[0].time.values())  # of every device
    mean.time[max(mean.time, key=mean.time.__getitem__)] += step_ps - sum(mean.time.values())
    return mean


class _Reading:
    """One pass over the actions of a process; those that repeat are read once."""

    def __init__(self, timeline: Timeline, process: int, programs: Sequence[Program]) -> None:
        self.step_ps, self.process = timeline.step_ps, timeline.processes[process]
        self.stages = {program.stage: _Stage(program) for program in programs}

    def run(self) -> _Amounts:
        known: dict[tuple[int, int], _Amounts] = {}
        total = _Amounts.none()
        for stage, span in self._spans():
            key = id(stage), id(span.played)
            if key not in known:
                known[key] = stage.action(span)
            total.add(known[key])
        for kind, ps in self.process.waited:
            total.time[BETWEEN, Cause(WAITING, WAITS.get(kind, kind))] += ps
        left = self.step_ps - sum(total.time.values())
        if left:
            total.time[BETWEEN, Cause(WAITING, SLOWEST)] += left
        return total

    def _spans(self) -> Iterator[tuple["_Stage", Span]]:
        """Each action with its stage: passes of a process with several name theirs (`2F0`), and the
        update is that of one after the other.
        """
        stages, updated = list(self.stages.values()), Counter[str]()
        for span in self.process.spans:
            if len(stages) == 1:
                yield stages[0], span
            elif span.name in UPDATE:
                yield stages[updated[span.name] % len(stages)], span
                updated[span.name] += 1
            else:
                number = span.name[: len(span.name) - len(span.name.lstrip("0123456789"))]
                yield self.stages[int(number or 0)], span

    def peak(self) -> Peak:
        """Memory changes in the order of the program, as `Simulator` counts them."""
        held = self.process.base
        best = Peak(held, "", "", "")
        most = sum(held)
        worst: tuple[Sequence[int], Span] | None = None
        for span in self.process.spans:
            if sum(held) + span.played.memory.peak > most:
                most, worst = sum(held) + span.played.memory.peak, (held, span)
            held = tuple(a + b for a, b in zip(held, span.played.memory.net, strict=True))
        if worst is None:
            return best
        start, span = worst
        for now, piece, note in _held(span.played, start):
            if sum(now) == most:
                return Peak(tuple(now), span.name, piece.placed.prefix, note.name)
        return best


class _Stage:
    """Reads the actions of one program."""

    def __init__(self, program: Program) -> None:
        pcg, self.mesh = program.pcg, program.pcg.mesh
        self.links = (*(level.name for level in program.cluster.levels), *HOST)
        calls = [item for item in pcg.main.body if isinstance(item, PCall)]
        self.kinds = {call.prefix: pcg.by_name[call.function].kind for call in calls}
        self.launched: dict[str, Group] = {}

    def action(self, span: Span) -> _Amounts:
        """All of one action."""
        found = _Amounts.none()
        for piece in span.played.pieces:
            place = self.kinds.get(piece.placed.prefix, MAIN)
            self._piece(piece, STEP if span.name in UPDATE else place, found)
        # What messages that are sent take from kernels.
        more = span.played.ps - sum(found.time.values())
        if more:
            found.time[BETWEEN, Cause(BESIDE)] += more
            found.busy[COMPUTING] += more
        return found

    def _piece(self, piece: Piece, place: str, found: _Amounts) -> None:
        segment, prefix = piece.placed.segment, piece.placed.prefix
        again = _again(segment.notes)
        listed = zip(segment.instructions, segment.notes, strict=True)
        for index, (instruction, note) in enumerate(listed):
            if isinstance(instruction, Run):
                if instruction.ps:
                    what = AGAIN if index in again else _what(note)
                    found.time[place, Cause(what)] += instruction.ps
                    found.busy[COMPUTING] += instruction.ps
                continue
            group = Group(
                place, kind_of(instruction.key), _axes(instruction), self._level(instruction)
            )
            self.launched[_name(piece, instruction.key, prefix)] = group
            found.count[group] += 1
            found.num_bytes[group] += instruction.num_bytes
            moves = [(self.links[f.links[0]], f.size // SHARES) for f in instruction.flows]
            found.ps[group] += instruction.ps + max((ps for _, ps in moves), default=0)
            found.busy.update(dict(moves))
        for _, ps in piece.outcome.slowed[0]:
            found.time[place, Cause(BESIDE)] += ps
            found.busy[COMPUTING] += ps
        for _, key, ps in piece.outcome.waited[0]:
            group = self.launched[_name(piece, key, prefix)]
            found.time[place, Cause(WAITING, group.transfer, group.level)] += ps
            found.waited[group] += ps

    def _level(self, launch: Launch) -> str:
        """The level that a transfer keeps busy longest; without bytes, the slowest it crosses."""
        if launch.flows:
            return self.links[max(launch.flows, key=lambda flow: flow.size).links[0]]
        if launch.channel in HOST:
            return launch.channel
        return self.links[max(self.mesh[axis].level for axis in _axes(launch).split("+"))]


def _held(played: Played, start: Sequence[int]) -> Iterator[tuple[list[int], Piece, Note]]:
    """What is held after every change of memory; one list, which changes."""
    held = list(start)
    assert len(held) == len(COMPONENTS)
    changes: Changes
    for piece in played.pieces:
        for note in piece.placed.segment.notes:
            for changes in (note.before, note.after):
                for component, size in changes:
                    held[component] += size
                yield held, piece, note


def _axes(launch: Launch) -> str:
    """The axes that a transfer runs over, or the name of its channel."""
    return launch.channel.removesuffix(f" {OF_WEIGHTS}")


def _name(piece: Piece, key: str, prefix: str) -> str:
    """A transfer by the same name wherever it is launched and waited for."""
    real = piece.names.get(key, key)
    return f"{prefix}/{real}" if real.startswith("activations") else real


def _again(notes: Sequence[Note]) -> range:
    """Where a call of a backward pass does again what its forward pass did."""
    marks = [i for i, n in enumerate(notes) if n.kind == "memory" and n.name in MARKS]
    return range(*marks[:2]) if marks else range(0)


def _what(note: Note) -> str:
    """Operators are named by their keys, which have a colon; movements by the values they make."""
    if note.kind in OWN_KINDS:
        return OWN_KINDS[note.kind]
    return COMPUTING if ":" in note.name else COPYING
