"""What was simulated: when every device did what, what it waited for, and the memory it held."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from parloom.cost.engine import Outcome, Run, State
from parloom.cost.tasks import COMPONENTS, COMPUTE, Load, Placed
from parloom.ir.expected import Prediction
from parloom.ir.graph import below

# What a device of a pipeline waits for between actions: messages of other stages, gradients of
# weights that stages share, and all gradients before an update where steps synchronize.
MESSAGES, SHARED, NORM = "pipeline", "gradients of shared weights", "gradients norm"
NOTHING = (0,) * len(COMPONENTS)
# Beyond so many instructions, what is inside actions is only shown in outline.
MAX_INSTRUCTIONS = 300_000


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per component after something minus before it, and the most above before it.

    `peak` is the most of all components together, which need not peak at once; `at_peak` is what
    each of them has then.
    """

    net: tuple[int, ...] = NOTHING
    peaks: tuple[int, ...] = NOTHING
    peak: int = 0
    at_peak: tuple[int, ...] = NOTHING

    def then(self, other: "Memory") -> "Memory":
        """This one, and then the other."""
        peaks = zip(self.peaks, self.net, other.peaks, strict=True)
        later = sum(self.net) + other.peak
        at_later = tuple(a + b for a, b in zip(self.net, other.at_peak, strict=True))
        return Memory(
            tuple(a + b for a, b in zip(self.net, other.net, strict=True)),
            tuple(max(own, net + other_peak) for own, net, other_peak in peaks),
            max(self.peak, later),
            self.at_peak if self.peak >= later else at_later,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A segment that was played, `start_ps` after its action; `names` of its transfers."""

    start_ps: int
    placed: Placed
    outcome: Outcome
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Played:
    """An action that was played: how long it took, and the transfers under way when it was over.

    `busy` are ps per compute stream or channel, `exposed` ps that the compute stream waited per
    kind of transfer. `load` is what was done meanwhile, without waits and whatever slows it.
    """

    ps: int
    state: State
    busy: tuple[tuple[str, int], ...]
    exposed: tuple[tuple[str, int], ...]
    memory: Memory
    pieces: tuple[Piece, ...] = ()
    load: Load = ()

    @property
    def num_instructions(self) -> int:
        """How many instructions it is made of, as far as they are known."""
        return sum(len(piece.placed.segment.notes) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Span:
    """An action at its place in time."""

    start_ps: int
    name: str
    played: Played


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that ran on a track (the compute stream or a channel) of a process."""

    process: int
    track: str
    name: str
    kind: str
    start_ps: int
    end_ps: int


@dataclass(frozen=True, slots=True)
class Message:
    """Something sent from one process to another."""

    name: str
    sender: int
    receiver: int
    channel: str
    start_ps: int
    end_ps: int
    used_ps: int


@dataclass(frozen=True, slots=True)
class Process:
    """The device that stands for all ranks of a stage, and the memory it holds all along.

    `waited` are ps per kind of transfer between actions, `left` what actions left under way;
    `device` is the type of the device on a mixed cluster.
    """

    name: str
    spans: tuple[Span, ...]
    base: tuple[int, ...] = NOTHING
    waited: tuple[tuple[str, int], ...] = ()
    left: tuple[Slice, ...] = ()
    device: str = ""

    @property
    def memory(self) -> Memory:
        """All of the step, above nothing."""
        memory = Memory(self.base, self.base, sum(self.base), self.base)
        for span in self.spans:
            memory = memory.then(span.played.memory)
        return memory

    @property
    def peak_bytes(self) -> int:
        """The peak of `memory`, without its components."""
        held = most = sum(self.base)
        for span in self.spans:
            memory = span.played.memory
            most = max(most, held + memory.peak)
            held += sum(memory.net)
        return most


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step that was simulated; `bound_ps` is what no overlap can beat.

    `step_ps` is the makespan, from all devices idle to all devices idle; `period_ps` the time from
    step to step where steps follow each other at once, None where that is the makespan.
    """

    step_ps: int
    processes: tuple[Process, ...]
    bound_ps: int
    messages: tuple[Message, ...] = ()
    period_ps: int | None = None

    @property
    def step_s(self) -> float:
        """The makespan."""
        return self.step_ps / 1e12

    @property
    def each_ps(self) -> int:
        """What a run of many steps shows as the time of one."""
        return self.step_ps if self.period_ps is None else self.period_ps

    @property
    def period_s(self) -> float:
        """The same in seconds."""
        return self.each_ps / 1e12

    @property
    def peak_bytes(self) -> int:
        """The most that any device holds."""
        return max(process.peak_bytes for process in self.processes)

    @property
    def peaks(self) -> tuple[tuple[str, int], ...]:
        """The most that any device of each type holds, on a mixed cluster."""
        found: dict[str, int] = {}
        for process in self.processes:
            found[process.device] = max(found.get(process.device, 0), process.peak_bytes)
        return tuple((device, peak) for device, peak in found.items() if device)

    def prediction(self) -> Prediction:
        """As a plan stores it: what the device that holds the most has of each component then."""
        memory = max((p.memory for p in self.processes), key=lambda memory: memory.peak)
        parts = tuple(zip(COMPONENTS, memory.at_peak, strict=True))
        several = range(len(self.processes)) if len(self.processes) > 1 else ()
        waits_s = tuple(self._waits_s(index) for index in several)
        found = Prediction(self.period_s, memory.peak, parts, "spec", peaks=self.peaks)
        return replace(found, waits_s=waits_s)

    def _waits_s(self, process: int) -> float:
        """How long it waits for other stages, whether or not steps synchronize."""
        waited = dict(self.processes[process].waited)
        return sum(waited.get(kind, 0) for kind in (MESSAGES, SHARED)) / 1e12

    def busy(self, process: int = 0) -> dict[str, int]:
        """Picoseconds that the compute stream and the channels are busy."""
        totals = {COMPUTE: 0}
        for span in self.processes[process].spans:
            for name, ps in span.played.busy:
                totals[name] = totals.get(name, 0) + ps
        for left in self.processes[process].left:
            totals[left.track] = totals.get(left.track, 0) + left.end_ps - left.start_ps
        for message in self.messages:
            if message.sender == process:
                ps = message.end_ps - message.start_ps
                totals[message.channel] = totals.get(message.channel, 0) + ps
        return totals

    def exposed(self, process: int = 0) -> dict[str, int]:
        """Picoseconds that the compute stream waits, by kind of transfer."""
        totals = dict(self.processes[process].waited)
        for span in self.processes[process].spans:
            for name, ps in span.played.exposed:
                totals[name] = totals.get(name, 0) + ps
        return totals


def slices(span: Span, process: int = 0) -> Iterator[Slice]:
    """What ran inside an action; a transfer that goes on from one segment to the next comes in
    parts (see `joined`).
    """
    for piece in span.played.pieces:
        segment, start = piece.placed.segment, span.start_ps + piece.start_ps
        prefix = piece.placed.prefix
        slowed = dict(piece.outcome.slowed[0])
        listed = zip(segment.instructions, segment.notes, piece.outcome.starts[0], strict=True)
        for index, (instruction, note, at) in enumerate(listed):
            if isinstance(instruction, Run) and instruction.ps:
                begin = start + at
                name = below(prefix, note.name)
                end = begin + instruction.ps + slowed.get(index, 0)
                yield Slice(process, COMPUTE, name, note.kind, begin, end)
        for moved in piece.outcome.moved:
            if moved.end_ps > moved.start_ps:
                key = piece.names.get(moved.key, moved.key)
                kind, _, name = key.partition("|")
                name = name if moved.key in piece.names else below(prefix, name)
                begin, end = start + moved.start_ps, start + moved.end_ps
                yield Slice(process, moved.channel, name, kind, begin, end)


def joined(parts: Iterable[Slice]) -> Iterator[Slice]:
    """Slices with the parts of one transfer put together."""
    open_: dict[str, Slice] = {}
    for part in parts:
        before = open_.get(part.track)
        if part.track == COMPUTE:
            yield part
        elif before and (before.name, before.end_ps) == (part.name, part.start_ps):
            open_[part.track] = replace(before, end_ps=part.end_ps)
        else:
            if before:
                yield before
            open_[part.track] = part
    yield from open_.values()


def memory_line(span: Span) -> Iterator[tuple[int, int, int]]:
    """(time in ps, component, bytes that it changes by) inside an action, in order of time."""
    for piece in span.played.pieces:
        segment, start = piece.placed.segment, span.start_ps + piece.start_ps
        listed = zip(segment.instructions, segment.notes, piece.outcome.starts[0], strict=True)
        for instruction, note, at in listed:
            for component, size in note.before:
                yield start + at, component, size
            end = at + instruction.ps if isinstance(instruction, Run) else at
            for component, size in note.after:
                yield start + end, component, size


def sampled(timeline: Timeline, process: int, columns: int) -> list[list[int]]:
    """Per component, what is held in each of `columns` equal parts of the step when all of them
    together hold most, so that the lines of the components add up.
    """
    device = timeline.processes[process]
    held = list(device.base)
    found = [tuple(held)] + [(0,) * len(held)] * (columns - 1)
    most = [sum(held)] + [-1] * (columns - 1)
    length = max(1, timeline.step_ps)
    filled = 0

    def note(column: int) -> None:
        together = sum(held)
        if together > most[column]:
            most[column], found[column] = together, tuple(held)

    def at(when: int) -> int:
        """The column of a time, after everything before it has been filled in."""
        nonlocal filled
        column = min(columns - 1, when * columns // length)
        while filled < column:
            filled += 1
            note(filled)
        return column

    detailed = sum(span.played.num_instructions for span in device.spans) <= MAX_INSTRUCTIONS
    for span in device.spans:
        known = detailed and span.played.pieces
        for when, component, size in memory_line(span) if known else _outline(span):
            column = at(when)
            held[component] += size
            note(column)
    at(length)
    return [list(line) for line in zip(*found, strict=True)]


def _outline(span: Span) -> Iterator[tuple[int, int, int]]:
    """The memory of an action of which only its peak and what stays are to be shown."""
    memory, end = span.played.memory, span.start_ps + span.played.ps
    for component, (size, net) in enumerate(zip(memory.at_peak, memory.net, strict=True)):
        if size or net:
            yield span.start_ps, component, size
    for component, (size, net) in enumerate(zip(memory.at_peak, memory.net, strict=True)):
        if size or net:
            yield end, component, net - size
