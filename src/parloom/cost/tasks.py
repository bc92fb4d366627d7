"""A step as instructions for the engine: actions of segments, built from priced works.

A segment is what is played in one go: a call of a block, or operators of main between calls. Equal
segments are one value with placeholders for the names of transfers, so that equal blocks are played
once. All ranks of a stage do the same, so one device stands for them; its links are the levels of
the topology, and to and from the host.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from parloom.cost.engine import Flow, Instruction, Launch, Run
from parloom.cost.works import Exchange
from parloom.errors import InputError
from parloom.ir.mesh import Cluster

COMPONENTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "recomputation",
    "communication",
    "buffers",
)
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, RECOMPUTATION, COMMUNICATION, BUFFERS = range(7)
COMPUTE = "compute"
# The names of what comes before and after what a backward pass does again of a forward pass.
RECOMPUTING, RECOMPUTED = "recomputing", "recomputed"
# A link's capacity a picosecond: divides evenly among up to 16 flows.
SHARES = 720720
PS = 10**12
LONGEST_S = 1e5

Changes = tuple[tuple[int, int], ...]
"""(index into COMPONENTS, bytes), one after the other."""


Load = tuple[tuple[str | int, int], ...]
"""What has how much to do: (compute or a channel, ps that it takes alone), and (link, units)."""


@dataclass(frozen=True, slots=True)
class Note:
    """What an instruction is, and the memory that changes when it starts and when it is over."""

    name: str
    kind: str
    before: Changes = ()
    after: Changes = ()


Entry = tuple[Instruction, Note]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Instructions with their notes; `awaited` are the transfers that others launched."""

    instructions: tuple[Instruction, ...]
    notes: tuple[Note, ...]
    awaited: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A segment at a place in the model; `keys` are (transfer, its placeholder)."""

    segment: Segment
    prefix: str = ""
    keys: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """A named list of segments, or an edited copy of one."""

    name: str
    parts: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class StepTasks:
    """One device's step.

    `actions` in order: those that repeat are one value. `links` names what `capacities` belong to;
    `base` is the memory held all along, in the order of COMPONENTS.
    """

    actions: tuple[Action, ...]
    links: tuple[str, ...]
    capacities: tuple[int, ...]
    base: tuple[int, ...]

    def edited(self, action: Action, part: int, new: Segment) -> "StepTasks":
        """With another segment as that part of an action, wherever the action is run."""
        placed = replace(action.parts[part], segment=new)
        parts = (*action.parts[:part], placed, *action.parts[part + 1 :])
        other = Action(action.name, parts)
        return replace(self, actions=tuple(other if a is action else a for a in self.actions))


def loads(
    instructions: Iterable[Instruction], capacities: Sequence[int]
) -> Iterator[tuple[str | int, int]]:
    """What the instructions leave compute, channels and links to do."""
    for instruction in instructions:
        if isinstance(instruction, Run):
            yield COMPUTE, instruction.ps
            continue
        alone = 0
        for flow in instruction.flows:
            for link in flow.links:
                yield link, flow.size
                alone = max(alone, flow.size // capacities[link])
        yield instruction.channel, instruction.ps + alone


def picoseconds(seconds: float) -> int:
    """Whole picoseconds; raises `InputError` for what sums of 64 bits could not hold."""
    if not seconds <= LONGEST_S:
        raise InputError(
            f"one operator or transfer of this step would take {seconds:.2g} s: is a rate, a"
            " bandwidth or a latency of the cluster far too low?"
        )
    return round(seconds * PS)


def key_of(kind: str, name: str) -> str:
    """The key of a transfer: what it is for, and its name."""
    return f"{kind}|{name}"


def kind_of(key: str) -> str:
    """What a transfer is for."""
    return key.partition("|")[0]


# The channel of weights and gradients: activations do not wait for them (`runtime.comm`).
OF_WEIGHTS = "(weights)"


class Links:
    """What transfers take of one device's links."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        levels = tuple(level.name for level in cluster.levels)
        self.names = (*levels, "to host", "from host")
        self.capacities = (SHARES,) * len(self.names)
        self._known: dict[Exchange, tuple[int, tuple[Flow, ...], int]] = {}

    def exchange(self, key: str, exchange: Exchange, channel: str = "") -> Launch:
        """A collective: it has its level's link to itself for what it takes alone.

        Other levels are busy for as long as they have work at their rate. Collectives over the same
        axes run one after the other, but for those of a `channel` of their own.
        """
        if exchange not in self._known:
            latency = picoseconds(exchange.latency_s)
            moves = picoseconds(exchange.seconds) - latency
            busy = dict(exchange.busy)
            most = max(busy.values(), default=0.0)
            flows = tuple(
                Flow(round(moves * (time / most)) * SHARES, (level,))
                for level, time in busy.items()
                if time and moves > 0
            )
            sent = sum(size for level, size, _ in exchange.traffic if busy.get(level) == most)
            self._known[exchange] = latency, flows, round(sent)
        latency, flows, sent = self._known[exchange]
        axes = "+".join(sorted(exchange.axes))
        channel = f"{axes} {channel}" if channel else axes
        slows = round(1000 * exchange.slows) if latency or flows else 0
        return Launch(key, channel, latency, flows, sent, slows)

    def host(self, key: str, num_bytes: int, to_host: bool) -> Launch:
        """A copy between device and host; raises `InputError` where no host is described."""
        host = self.cluster.host
        if host is None:
            raise InputError(
                f"the plan keeps {num_bytes} bytes in host memory, but {self.cluster.name} has no"
                " host: describe it in a cluster file (`host:`), or plan again"
            )
        name = "to host" if to_host else "from host"
        moves = picoseconds(num_bytes / host.link.payload_bytes_per_s)
        flows = (Flow(moves * SHARES, (self.names.index(name),)),) if moves else ()
        return Launch(key, name, picoseconds(host.link.latency_s), flows, num_bytes)


@dataclass(slots=True)
class Listing:
    """Instructions as they are written one after the other."""

    entries: list[Entry] = field(default_factory=list)

    def run(
        self,
        name: str,
        kind: str,
        ps: int = 0,
        waits: tuple[str, ...] = (),
        before: Changes = (),
        after: Changes = (),
    ) -> None:
        """The compute stream runs."""
        self.entries.append((Run(ps, waits), Note(name, kind, _some(before), _some(after))))

    def launch(
        self, launch: Launch, name: str = "", before: Changes = (), after: Changes = ()
    ) -> None:
        """A transfer sets out."""
        note = Note(name, kind_of(launch.key), _some(before), _some(after))
        self.entries.append((launch, note))


def segment(entries: Sequence[Entry]) -> Segment:
    """A segment of these instructions."""
    launched: set[str] = set()
    awaited: set[str] = set()
    for instruction, _ in entries:
        if isinstance(instruction, Run):
            awaited.update(key for key in instruction.waits if key not in launched)
        else:
            launched.add(instruction.key)
    listed = tuple(entries)
    return Segment(tuple(i for i, _ in listed), tuple(n for _, n in listed), frozenset(awaited))


def with_placeholders(
    lists: Iterable[Sequence[Entry]],
) -> tuple[tuple[tuple[Entry, ...], ...], tuple[tuple[str, str], ...]]:
    """The lists with placeholders for transfers that outlive a segment, and which."""
    keys: dict[str, str] = {}

    def stand_in(key: str) -> str:
        if key.startswith("activations"):  # whoever moves them waits for them
            return key
        return keys.setdefault(key, key_of(kind_of(key), str(len(keys))))

    found = []
    for entries in lists:
        shown: list[Entry] = []
        for instruction, note in entries:
            if isinstance(instruction, Launch):
                shown.append((replace(instruction, key=stand_in(instruction.key)), note))
            elif instruction.waits:
                waits = tuple(stand_in(key) for key in instruction.waits)
                shown.append((replace(instruction, waits=waits), note))
            else:
                shown.append((instruction, note))
        found.append(tuple(shown))
    return tuple(found), tuple(keys.items())


def _some(changes: Changes) -> Changes:
    return tuple(change for change in changes if change[1])
