"""Pipelines: the actions of every stage, each played once, run across ranks as a schedule says.

Stages form a directed acyclic graph, of which schedules by name take chains. One rank stands for
all of a stage. An action takes as long as it took when it was played alone;
what it leaves under way (reductions of gradients) goes on beside the next ones. Activations and
their gradients are sent when an action is over, beside whatever runs next, and share the links of
both ranks with all that is under way.

Steps synchronize where the gradients' norm is clipped or a scaled loss may have overflowed: no rank
updates its weights before all gradients are known. Zero-bubble runs update first and validate
afterwards (Qi et al., ICLR'24, section 4), so that every rank begins its next step on its own.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from parloom.cost.actions import StageWriter
from parloom.cost.collectives import collective
from parloom.cost.engine import Engine, Flow, Instruction, Launch, Outcome, Run
from parloom.cost.kernels import Kernels
from parloom.cost.simulate import Simulator
from parloom.cost.tasks import COMPUTE, SHARES, kind_of, loads, picoseconds
from parloom.cost.timeline import (
    MESSAGES,
    NORM,
    NOTHING,
    SHARED,
    Message,
    Played,
    Process,
    Slice,
    Span,
    Timeline,
)
from parloom.errors import InputError
from parloom.ir.plan import Action
from parloom.ir.regular_parts import Join
from parloom.ir.schedules import AUTOMATIC, Lists, schedule
from parloom.ir.zero_bubble import PassTimes, zero_bubble

# Steps that are played for the period: the first one starts with idle ranks, and the two after it
# are as far apart as all later ones.
REPEATED = 3


@dataclass(frozen=True, slots=True)
class Send:
    """What one rank sends to its peer in another stage: alone, latency and then `moves_ps` on the
    links of topology level `level` of both, and beside it what one of them alone has to move: it
    stands for fewer ranks. `computes_ps` is what devices lose at both ends, where that was
    measured: processors that send compute less.
    """

    latency_ps: int = 0
    moves_ps: int = 0
    level: int = 0
    sends_ps: int = 0
    receives_ps: int = 0
    computes_ps: int = 0

    def beside(self, other: "Send") -> "Send":
        """Both messages, of which neither waits for the other."""
        return Send(
            max(self.latency_ps, other.latency_ps),
            self.moves_ps + other.moves_ps,
            max(self.level, other.level),
            self.sends_ps + other.sends_ps,
            self.receives_ps + other.receives_ps,
            self.computes_ps + other.computes_ps,
        )

    @property
    def ps(self) -> int:
        """How long it takes alone."""
        return self.latency_ps + self.moves_ps + max(self.sends_ps, self.receives_ps)


@dataclass(frozen=True, slots=True)
class Edge:
    """What stage `source` sends to `target` after F, and gets back after B: None where no gradient
    is wanted. With `later` the target reads it in the next step.
    """

    source: int
    target: int
    forward: Send = Send()
    backward: Send | None = Send()
    later: bool = False


def chain(count: int, forward: Send = Send(), backward: Send = Send()) -> tuple[Edge, ...]:
    """Stages of which each feeds the next one."""
    return tuple(Edge(index, index + 1, forward, backward) for index in range(count - 1))


@dataclass(frozen=True, slots=True)
class StageActions:
    """A stage: what its actions are like, by the kinds that action lists have.

    `actions` has `F`, `B` and the step program's, and `W` where the backward pass is split: `B` is
    then, as in lists, its first half, which `cost/actions.py` calls `I`. `B first`, `B last` and
    `W last` are those of the first and the last microbatch, where they differ. `num_microbatches`
    are all of a step, also those that other replicas run: the prologue is computed of each.
    `device` is the type of its devices.
    """

    name: str
    actions: Mapping[str, Played]
    base: tuple[int, ...] = NOTHING
    num_microbatches: int = 1
    device: str = ""


@dataclass(frozen=True, slots=True)
class Shared:
    """Weights that several stages have (tied embeddings): their ranks add up the gradients in a
    ring before they update, in which each sends `sent` to the next one.
    """

    stages: tuple[int, ...]
    sent: Send


def send(sent: float, received: float, join: Join, kernels: Kernels | None = None) -> Send:
    """What it takes where each rank of one stage sends so many bytes and each one of the other
    receives so many: as measured, where `kernels`, those of the whole cluster, know. Nothing
    crosses a level of one child, as between stages on the same devices.
    """
    level, cluster = join.level, join.cluster
    if cluster.levels[level].size == 1:
        return Send(level=level)
    size, group = max(sent, received), ((level, 2),)
    if kernels is not None and not join.bridges:
        kernels = kernels.on(cluster.device)
    table = kernels.exchanges if kernels is not None else None
    measured = table.exchange("send", size, group) if table is not None else None
    computes_ps = 0
    if measured is not None:
        seconds, latency_s, slows = measured
        computes_ps = picoseconds(seconds * slows / (1 + slows))  # the part that kernels lose
    else:
        found = collective("send", size, group, cluster)
        seconds, latency_s = found.seconds, found.latency_s
    latency = picoseconds(latency_s)
    whole = max(0, picoseconds(seconds) - latency)
    both = round(whole * min(sent, received) / max(sent, received, 1))
    more = whole - both
    ends = (more, 0) if sent > received else (0, more)
    return Send(latency, both, level, *ends, computes_ps)


def play_stage(
    name: str, stage: StageWriter, simulator: Simulator, *, split: bool = False
) -> StageActions:
    """Play each action of a stage once; with `split`, the halves of the backward pass apart."""
    listed = {"PROLOGUE": stage.prologue()} if stage.pcg.hoisted else {}
    listed["F"] = stage.forward()
    if split:
        listed["B"] = stage.backward(part="I")
        listed["W"] = stage.backward(part="W")
        stage.forward()
        listed["W last"] = listed["W only"] = stage.backward(last=True, part="W")
    else:
        alone = stage.pcg.num_microbatches == 1
        listed["B first"] = stage.backward(first=True, last=alone)
        listed["B"] = stage.again() if not alone else listed["B first"]
        listed["B last"] = stage.again(last=True) if not alone else listed["B first"]
        # Of several microbatches one alone, as replicas may have: its gradients stay, as the first
        # one's do; those that are reduced leave, as the last one's do.
        listed["B only"] = listed["B last" if stage.pcg.decisions.num_ranks > 1 else "B first"]
    listed |= {"REDUCE": stage.reduce(), "STEP": stage.update(), "GATHER": stage.publish()}
    tasks = stage.step(tuple(listed.values()))
    actions = {
        kind: simulator.action(action, (), tasks.capacities) for kind, action in listed.items()
    }
    return StageActions(name, actions, tasks.base, stage.pcg.num_microbatches)


@dataclass(slots=True)
class _Rank:
    """A rank's instructions, and what those that run stand for."""

    index: int
    instructions: list[Instruction] = field(default_factory=list)
    runs: list[tuple[int, str, Played]] = field(default_factory=list)
    under_way: list[str] = field(default_factory=list)


def action_lists(
    name: str,
    stages: Sequence[StageActions],
    num_microbatches: int,
    chunks: int = 1,
    edges: Sequence[Edge] = (),
) -> Lists:
    """The action lists of schedule `name` for a chain of stages, `chunks` of them on each rank;
    `edges` say how long those that are made for the times of stages have to wait for what is sent.

    Raises `InputError` for an unknown schedule and for numbers that it cannot take.
    """
    if name not in AUTOMATIC or chunks > 1:
        return schedule(name, len(stages), num_microbatches, chunks)
    times = [pass_times(stage, index, edges) for index, stage in enumerate(stages)]
    return zero_bubble(times, num_microbatches, AUTOMATIC[name])


def pass_times(stage: StageActions, index: int, edges: Sequence[Edge] = ()) -> PassTimes:
    """The passes of stage `index` as schedules see them."""
    forward, backward = stage.actions["F"], stage.actions["B"]
    weights = stage.actions.get("W")
    held = sum(forward.memory.net)
    kept = held + sum(backward.memory.net) if weights else 0
    there = [e.forward for e in edges if index in (e.source, e.target)]
    back = [e.backward for e in edges if index in (e.source, e.target) and e.backward]
    return PassTimes(
        forward.ps + sum(sent.computes_ps for sent in there),
        backward.ps + sum(sent.computes_ps for sent in back),
        weights.ps if weights else 0,
        max((e.forward.ps for e in edges if e.source == index), default=0),
        max((e.backward.ps for e in edges if e.target == index and e.backward), default=0),
        # A stage that keeps nothing counts its microbatches.
        *((held, max(0, kept)) if held > 0 else (1, 1)),
    )


def simulate_pipeline(
    lists: Lists,
    stages: Sequence[StageActions],
    edges: Sequence[Edge] | None = None,
    *,
    shared: Sequence[Shared] = (),
    synchronizes: bool = True,
) -> Timeline:
    """Run the action lists of all ranks; a stage is on the rank whose list has its passes.

    Without `edges` stages are a chain in which sending takes no time; `shared` are weights that
    several stages have. Where steps do not synchronize, several are played for the period; those
    that read what the one before sends (`later`) follow it at once. Raises
    `InputError` for a stage that is on no rank or on two, `VerifyError` where the lists wait for
    each other.
    """
    edges = chain(len(stages)) if edges is None else edges
    synchronizes = synchronizes and not any(edge.later for edge in edges)
    pipeline = _Pipeline(lists, stages, edges, shared, synchronizes)
    found = pipeline.run()
    return found if synchronizes else replace(found, period_ps=pipeline.period_ps())


_Sent = tuple[str, Edge, Send]
"""A message: its key, between which stages, and what it takes."""


class _Pipeline:
    def __init__(
        self,
        lists: Lists,
        stages: Sequence[StageActions],
        edges: Sequence[Edge],
        shared: Sequence[Shared],
        synchronizes: bool,
    ) -> None:
        self.lists, self.stages = lists, stages
        self.rank_of = _placed(lists, len(stages))
        self.counts = [0] * len(stages)  # of microbatches
        for action in (a for own in lists for a in own):
            if action.microbatch is not None:
                self.counts[action.stage] = max(self.counts[action.stage], action.microbatch + 1)
        # Between stages on one rank nothing is sent.
        self.edges = [e for e in edges if self.rank_of[e.source] != self.rank_of[e.target]]
        self.into: list[list[Edge]] = [[] for _ in stages]
        self.out_of: list[list[Edge]] = [[] for _ in stages]
        for edge in self.edges:
            self.into[edge.target].append(edge)
            self.out_of[edge.source].append(edge)
        self.on: list[list[StageActions]] = [[] for _ in lists]
        for stage, rank in zip(stages, self.rank_of, strict=True):
            self.on[rank].append(stage)
        self.ways: dict[str, tuple[int, int]] = {}
        rings = [(dict.fromkeys(self.rank_of[s] for s in e.stages), e.sent) for e in shared]
        self.shared = [(tuple(ring), sent) for ring, sent in rings if len(ring) > 1]
        updates = any("STEP" in stage.actions for stage in stages)
        self.synchronizes = synchronizes and updates and len(lists) > 1
        left = (state for s in stages for p in s.actions.values() for state in p.state)
        sends = [sent for e in self.edges for sent in (e.forward, e.backward) if sent]
        sends += [sent for _, sent in self.shared]
        used = [flow.links[0] for state in left for flow in state.flows]
        self.levels = 1 + max([*used, *(sent.level for sent in sends)], default=0)
        self.capacities = (SHARES,) * (2 * self.levels * len(lists))

    def run(self) -> Timeline:
        """Play all ranks."""
        ranks = [self._rank(index, listed) for index, listed in enumerate(self.lists)]
        outcome = self._play(ranks)
        bound_ps = self._bound_ps(ranks)
        messages, used = [], dict(self._used(ranks, outcome))
        left: list[list[Slice]] = [[] for _ in ranks]
        for moved in outcome.moved:
            owner, _, channel = moved.channel.partition(" ")
            kind, _, name = moved.key.partition("|")
            rank = int(owner)
            if kind == MESSAGES:
                when = used.get(moved.key, moved.end_ps)
                ends = self.ways[moved.key]
                messages.append(Message(name, *ends, channel, moved.start_ps, moved.end_ps, when))
            elif kind != NORM:
                left[rank].append(Slice(rank, channel, name, kind, moved.start_ps, moved.end_ps))
        processes = tuple(self._process(rank, outcome, left[rank.index]) for rank in ranks)
        return Timeline(outcome.end_ps, processes, bound_ps, tuple(messages))

    def period_ps(self) -> int:
        """The time from the end of a step to that of the next one, on the slowest rank."""
        ranks = [self._rank(index, listed, REPEATED) for index, listed in enumerate(self.lists)]
        starts = self._play(ranks).starts
        found = 0
        for rank, started in zip(ranks, starts, strict=True):
            each = len(rank.runs) // REPEATED
            before, last = rank.runs[-1 - each], rank.runs[-1]
            found = max(found, started[last[0]] - started[before[0]])
        return found

    def _play(self, ranks: Sequence[_Rank]) -> Outcome:
        return Engine([rank.instructions for rank in ranks], self.capacities).play()

    def _bound_ps(self, ranks: Sequence[_Rank]) -> int:
        """What no overlap can beat: the most that a compute stream, a channel or a link has to do.

        Inside of actions and beside them links count apart: they are not played as shared.
        """
        totals = Counter[tuple[int | None, str | int]]()
        for rank in ranks:
            for _, _, played in rank.runs:
                for what, amount in played.load:
                    totals[rank.index, what] += amount
            launched = (i for i in rank.instructions if isinstance(i, Launch))
            for what, amount in loads(launched, self.capacities):
                totals[None, what] += amount
        done = (n // SHARES if isinstance(what, int) else n for (_, what), n in totals.items())
        return max(done, default=0)

    def _process(self, rank: _Rank, outcome: Outcome, left: list[Slice]) -> Process:
        starts = outcome.starts[rank.index]
        spans = tuple(Span(starts[index], name, played) for index, name, played in rank.runs)
        waited: dict[str, int] = {}
        for _, key, ps in outcome.waited[rank.index]:
            waited[kind_of(key)] = waited.get(kind_of(key), 0) + ps
        mine = self.on[rank.index]
        base = tuple(map(sum, zip(*(stage.base for stage in mine), strict=True)))
        name = ", ".join(stage.name for stage in mine)
        device = mine[0].device if mine else ""
        return Process(name, spans, base, tuple(waited.items()), tuple(left), device)

    def _rank(self, index: int, listed: Sequence[Action], steps: int = 1) -> _Rank:
        """The instructions of one rank for steps that follow each other."""
        rank = _Rank(index)
        passes = [(i, (a.stage, a.kind)) for i, a in enumerate(listed) if a.microbatch is not None]
        ends = {key: i for i, key in passes}
        begins = {key: i for i, key in reversed(passes)}
        for step in range(steps):
            for stage, own in enumerate(self.rank_of):
                if own == index:
                    self._prologue(rank, stage)
            for position, action in enumerate(listed):
                if action.microbatch is None:
                    self._update(rank, action.kind, step)
                    continue
                key = action.stage, action.kind
                place = {begins[key]: "first", ends[key]: "last"}.get(position, "")
                place = "only" if begins[key] == ends[key] else place
                if step:
                    later = step * self.counts[action.stage]
                    action = replace(action, microbatch=action.microbatch + later)
                self._pass(rank, action, place)
        return rank

    def _prologue(self, rank: _Rank, stage: int) -> None:
        """What a stage computes of the batch alone, of all microbatches of the step."""
        played = self.stages[stage].actions.get("PROLOGUE")
        if played is None:
            return
        number = stage if len(self.on[rank.index]) > 1 else ""
        for microbatch in range(self.stages[stage].num_microbatches):
            self._run(rank, f"{number}P{microbatch}", played, ())

    def _pass(self, rank: _Rank, action: Action, place: str) -> None:
        """One pass, the `first` or the `last` of its kind: wait for what it reads, run, send what
        it made.
        """
        stage = self.stages[action.stage]
        played = stage.actions[action.kind]
        if place:
            played = stage.actions.get(f"{action.kind} {place}", played)
        alone = len(self.on[rank.index]) == 1
        name = f"{action.kind}{action.microbatch}" if alone else str(action)
        came, leaves = self._messages(action)
        more = sum(sent.computes_ps for _, _, sent in (*came, *leaves))
        needs = tuple(key for key, _, _ in came)
        if more:
            own = COMPUTE, more
            busy, load = (*played.busy, own), (*played.load, own)
            played = replace(played, ps=played.ps + more, busy=busy, load=load)
        self._run(rank, name, played, needs)
        back = action.kind == "B"
        for key, edge, sent in leaves:
            peer = self.rank_of[edge.source if back else edge.target]
            self.ways[key] = rank.index, peer
            channel = f"{rank.index} send {'backward' if back else 'forward'}"
            self._send(rank, peer, sent, key, channel)

    def _send(self, rank: _Rank, peer: int, sent: Send, key: str, channel: str) -> None:
        out, into = self._link(rank.index, sent.level), self._link(peer, sent.level, inward=True)
        moved = (sent.moves_ps, (out, into)), (sent.sends_ps, (out,)), (sent.receives_ps, (into,))
        flows = tuple(Flow(ps * SHARES, links) for ps, links in moved if ps)
        rank.instructions.append(Launch(key, channel, sent.latency_ps, flows))

    def _add_shared(self, rank: _Rank, step: int) -> None:
        """Launch and await the sums of gradients of weights that other ranks have, too."""
        keys: list[str] = []
        for index, (ring, sent) in enumerate(self.shared):
            if rank.index not in ring:
                continue
            peer = ring[(ring.index(rank.index) + 1) % len(ring)]
            name = f"{SHARED}|{index} of step {step}"
            self._send(rank, peer, sent, f"{name} {rank.index}", f"{rank.index} send shared")
            keys += (f"{name} {other}" for other in ring)
        if keys:
            rank.instructions.append(Run(0, tuple(keys)))

    def _update(self, rank: _Rank, kind: str, step: int) -> None:
        """An action of the step program, which waits for all that is under way."""
        if kind == "STEP":
            self._add_shared(rank, step)
        if kind == "STEP" and self.synchronizes:
            channel = f"{rank.index} {NORM}"
            rank.instructions.append(Launch(f"{NORM}|{rank.index}", channel))
            rank.under_way += (f"{NORM}|{other}" for other in range(len(self.lists)))
        for stage in self.on[rank.index]:
            if kind in stage.actions:
                waits, rank.under_way = tuple(rank.under_way), []
                self._run(rank, kind, stage.actions[kind], waits)

    def _run(self, rank: _Rank, name: str, played: Played, waits: tuple[str, ...]) -> None:
        rank.runs.append((len(rank.instructions), name, played))
        rank.instructions.append(Run(played.ps, waits))
        for left in played.state:
            key = f"{left.key} {len(rank.instructions)}.{rank.index}"
            flows = tuple(
                Flow(f.size, tuple(self._link(rank.index, link) for link in f.links))
                for f in left.flows
            )
            channel = f"{rank.index} {left.channel}"
            rank.instructions.append(Launch(key, channel, left.ps, flows))
            rank.under_way.append(key)

    def _messages(self, action: Action) -> tuple[list[_Sent], list[_Sent]]:
        """What an action reads, and what it sends."""
        into, out_of = self.into[action.stage], self.out_of[action.stage]
        if action.kind == "F":
            ways = [[(e, e.forward) for e in edges] for edges in (into, out_of)]
        elif action.kind == "B":
            ways = [[(e, e.backward) for e in es if e.backward] for es in (out_of, into)]
        else:
            return [], []
        came, leaves = (
            [
                (_key(action.kind, n, e), e, sent)
                for e, sent in way
                for n in self._numbers(action, e)
            ]
            for way in ways
        )
        return came, leaves

    def _numbers(self, action: Action, edge: Edge) -> range:
        """The messages between two stages that an action sends or reads: one for each microbatch of
        the stage with the smaller ones. Nothing comes later than the first step for that one.
        """
        microbatch, own = action.microbatch or 0, self.counts[action.stage]
        if edge.later and action.stage == edge.target:
            microbatch -= own
        each = max(self.counts[edge.source], self.counts[edge.target]) // own
        return range(max(0, microbatch * each), max(0, (microbatch + 1) * each))

    def _link(self, rank: int, level: int, inward: bool = False) -> int:
        return (rank * self.levels + level) * 2 + inward

    def _used(self, ranks: Sequence[_Rank], outcome: Outcome) -> Iterator[tuple[str, int]]:
        """Transfers, and when the action that waits for them starts."""
        for rank, starts in zip(ranks, outcome.starts, strict=True):
            for index, _, _ in rank.runs:
                instruction = rank.instructions[index]
                if isinstance(instruction, Run):
                    yield from ((key, starts[index]) for key in instruction.waits)


def _placed(lists: Lists, count: int) -> tuple[int, ...]:
    """The rank of every stage."""
    found: dict[int, set[int]] = {stage: set() for stage in range(count)}
    for rank, listed in enumerate(lists):
        for action in listed:
            if action.microbatch is not None:
                found.setdefault(action.stage, set()).add(rank)
    for stage, ranks in found.items():
        if len(ranks) != 1 or stage >= count:
            where = f"on ranks {sorted(ranks)}" if ranks else "on no rank"
            raise InputError(f"stage {stage} of {count} is {where}; a stage is on one")
    return tuple(next(iter(found[stage])) for stage in range(count))


def _key(kind: str, microbatch: int, edge: Edge) -> str:
    ends = (edge.source, edge.target) if kind == "F" else (edge.target, edge.source)
    return f"{MESSAGES}|{kind}{microbatch} from stage {ends[0]} to {ends[1]}"
