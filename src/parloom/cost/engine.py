"""The event engine: compute streams, communication channels, and links that flows share.

A compute stream runs its list in order. `Run` computes, once what it waits for is over; `Launch`
hands a transfer to a channel and goes on. A channel runs its transfers one after the other: first
the latency, then all flows at once. Flows that use the same link share it max-min fairly: no flow
gets less so that one with more gets yet more (Bertsekas and Gallager, Data Networks, 6.5.2).

Time is whole picoseconds, and the rates that flows get are whole numbers too, so a result does not
depend on the order of additions: played on from a state, everything is as if played in one go.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from parloom.errors import VerifyError


@dataclass(frozen=True, slots=True)
class Flow:
    """`size` units over `links`; a link carries its capacity in units each picosecond."""

    size: int
    links: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """The compute stream is busy for `ps` once every transfer in `waits` is over."""

    ps: int
    waits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """A transfer called `key`: `ps` of latency, then its flows, on `channel`.

    While a channel is at it, kernels beside it take `slows` thousandths longer. `num_bytes` are for
    reports: those that a device sends over the level that is busy longest.
    """

    key: str
    channel: str
    ps: int = 0
    flows: tuple[Flow, ...] = ()
    num_bytes: int = field(default=0, compare=False)
    slows: int = 0


Instruction = Run | Launch
State = tuple[Launch, ...]
"""Transfers under way: by channel, in order, with what is left of them."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A transfer: when its channel took it up and when it ended."""

    key: str
    channel: str
    start_ps: int
    end_ps: int


@dataclass(slots=True)
class Outcome:
    """What happened.

    `starts` has one entry per instruction of every stream: when a run started, or a transfer was
    launched. `waited` are (run's index, the transfer that kept it waiting last, ps) per stream, and
    `slowed` (run's index, ps) by which transfers beside it made a run longer. `moved` are all
    transfers that a channel took up; those that `state` still has end with the last stream.
    """

    ends: list[int]
    starts: list[list[int]]
    moved: list[Moved]
    waited: list[list[tuple[int, str, int]]]
    slowed: list[list[tuple[int, int]]]
    state: State = ()

    @property
    def end_ps(self) -> int:
        """When the last stream ended."""
        return max(self.ends, default=0)


@dataclass(slots=True, eq=False)
class _Flow:
    """A flow under way: `left` units at time `since`, and `rate` from then on."""

    transfer: "_Transfer"
    links: tuple[int, ...]
    left: int
    rate: int = 0
    since: int = 0
    version: int = 0


@dataclass(slots=True, eq=False)
class _Transfer:
    launch: Launch
    start: int = 0
    flowing: bool = False
    flows: list[_Flow] = field(default_factory=list)


class Network:
    """Channels and links: what is under way, and when it ends."""

    def __init__(self, capacities: Sequence[int]) -> None:
        self._capacities = capacities
        self._channels: dict[str, deque[_Transfer]] = {}
        self._links: list[dict[_Flow, None]] = [{} for _ in capacities]
        # (time, number, transfer whose latency is over, or flow that ends, version of the flow)
        self._events: list[tuple[int, int, _Transfer | _Flow, int]] = []
        self._count = 0
        self._slowing: list[int] = []
        self.slowing = 0  # transfers launched and not over that slow kernels
        self._touched: dict[int, None] = {}
        self.ended: dict[str, int] = {}
        self.news: list[str] = []  # what ended since somebody looked
        self.moved: list[Moved] = []

    def launch(self, now: int, launch: Launch) -> None:
        """Queue a transfer; a later `settle` at the same time shares out the links."""
        queue = self._channels.get(launch.channel)
        if queue is None:
            queue = self._channels[launch.channel] = deque()
        queue.append(_Transfer(launch))
        self.slowing += launch.slows > 0
        self.ended.pop(launch.key, None)  # of one before that had the same name
        if len(queue) == 1:
            self._start(now, queue)

    def next_ps(self) -> int | None:
        """When something happens next."""
        events = self._events
        while events:
            when, _, what, version = events[0]
            if type(what) is _Flow and what.version != version:
                heappop(events)
                continue
            return when
        return None

    def advance(self, until: int) -> None:
        """Let everything happen up to and including `until`."""
        while (when := self.next_ps()) is not None and when <= until:
            while self.next_ps() == when:
                what = heappop(self._events)[2]
                if type(what) is _Flow:
                    self._end_flow(when, what)
                elif type(what) is _Transfer:
                    self._begin_flows(when, what)
            self.settle(when)

    def settle(self, now: int) -> None:
        """Share out the links whose flows have changed."""
        if not self._touched:
            return
        flows, links = self._component()
        self._touched = {}
        for flow in flows:
            flow.left -= flow.rate * (now - flow.since)
            flow.since = now
        rates = self._fair(flows, links) if len(flows) > 1 else None
        for flow in flows:
            rate = rates[flow] if rates else min(self._capacities[link] for link in flow.links)
            if rate != flow.rate:
                flow.rate = rate
                flow.version += 1
                # Rounded up: a flow is never over before all of it has arrived.
                self._at(now - (-flow.left // rate), flow, flow.version)

    @property
    def slows(self) -> int:
        """Thousandths by which what is under way makes kernels longer."""
        return max(self._slowing, default=0)

    def under_way(self, now: int) -> list[Moved]:
        """The transfers that channels have taken up, as if they ended now."""
        heads = ((name, queue[0]) for name, queue in sorted(self._channels.items()) if queue)
        return [Moved(head.launch.key, name, head.start, now) for name, head in heads]

    def state(self, now: int) -> State:
        """What is under way or queued at `now`, with what is left of it."""
        left: list[Launch] = []
        for channel in sorted(self._channels):
            for transfer in self._channels[channel]:
                launch = transfer.launch
                if transfer.flowing:
                    flows = tuple(
                        Flow(f.left - f.rate * (now - f.since), f.links) for f in transfer.flows
                    )
                    launch = replace(launch, ps=0, flows=flows)
                elif transfer is self._channels[channel][0]:
                    launch = replace(launch, ps=transfer.start + launch.ps - now)
                left.append(launch)
        return tuple(left)

    def _at(self, when: int, what: _Transfer | _Flow, version: int = 0) -> None:
        self._count += 1
        heappush(self._events, (when, self._count, what, version))

    def _start(self, now: int, queue: deque[_Transfer]) -> None:
        """The first of a channel starts; those that take no time end at once."""
        while queue:
            transfer = queue[0]
            transfer.start = now
            if transfer.launch.slows:
                self._slowing.append(transfer.launch.slows)
            if transfer.launch.ps:
                self._at(now + transfer.launch.ps, transfer)
                return
            self._flow(now, transfer)
            if transfer.flows:
                return
            self._finish(now, queue)

    def _begin_flows(self, now: int, transfer: _Transfer) -> None:
        """The latency is over."""
        self._flow(now, transfer)
        if not transfer.flows:
            queue = self._channels[transfer.launch.channel]
            self._finish(now, queue)
            self._start(now, queue)

    def _flow(self, now: int, transfer: _Transfer) -> None:
        transfer.flowing = True
        for flow in transfer.launch.flows:
            if flow.size > 0:
                moving = _Flow(transfer, flow.links, flow.size, 0, now)
                transfer.flows.append(moving)
                for link in flow.links:
                    self._links[link][moving] = None
                    self._touched[link] = None

    def _end_flow(self, now: int, flow: _Flow) -> None:
        flow.version += 1
        for link in flow.links:
            del self._links[link][flow]
            self._touched[link] = None
        transfer = flow.transfer
        transfer.flows.remove(flow)
        if not transfer.flows:
            queue = self._channels[transfer.launch.channel]
            self._finish(now, queue)
            self._start(now, queue)

    def _finish(self, now: int, queue: deque[_Transfer]) -> None:
        transfer = queue.popleft()
        launch = transfer.launch
        if launch.slows:
            self._slowing.remove(launch.slows)
            self.slowing -= 1
        self.ended[launch.key] = now
        self.news.append(launch.key)
        self.moved.append(Moved(launch.key, launch.channel, transfer.start, now))

    def _component(self) -> tuple[list[_Flow], list[int]]:
        """The flows whose rates depend on the touched links, and all links that they use."""
        flows: dict[_Flow, None] = {}
        links = list(self._touched)
        seen = set(links)
        for link in links:  # grows while it is walked
            for flow in self._links[link]:
                if flow not in flows:
                    flows[flow] = None
                    new = [other for other in flow.links if other not in seen]
                    links += new
                    seen.update(new)
        return list(flows), links

    def _fair(self, flows: list[_Flow], links: list[int]) -> dict[_Flow, int]:
        """Max-min fair rates: the link with the smallest share fixes its flows, then the rest."""
        rates: dict[_Flow, int] = {}
        left = {link: self._capacities[link] for link in links}
        open_ = {link: dict(self._links[link]) for link in links if self._links[link]}
        while open_:
            share, tight = min((left[link] // len(using), link) for link, using in open_.items())
            for flow in list(open_[tight]):
                rates[flow] = max(1, share)
                for link in flow.links:
                    left[link] -= share
                    del open_[link][flow]
            open_ = {link: using for link, using in open_.items() if using}
        return rates


class Engine:
    """Plays lists of instructions, one per compute stream, on one network."""

    def __init__(
        self,
        streams: Sequence[Sequence[Instruction]],
        capacities: Sequence[int],
        state: State = (),
        ended: Iterable[str] = (),
    ) -> None:
        self._streams = streams
        self._network = Network(capacities)
        self._network.ended |= dict.fromkeys(ended, 0)
        self._now = [0] * len(streams)
        self._at = [0] * len(streams)
        self._wakes: list[tuple[int, int]] = []
        self._blocked: dict[str, list[int]] = {}
        self._outcome = Outcome(
            self._now, [[] for _ in streams], [], [[] for _ in streams], [[] for _ in streams]
        )
        for launch in state:
            self._network.launch(0, launch)
        self._network.settle(0)

    def play(self) -> Outcome:
        """Play all lists to their ends; what is then under way is the outcome's state.

        Raises `VerifyError` where a stream waits for a transfer that nobody launches.
        """
        network, wakes = self._network, self._wakes
        for index in range(len(self._streams)):
            self._go_on(index, 0)
        self._spread(0)
        while wakes or self._blocked:
            now = network.next_ps()
            if now is None and not wakes:
                raise VerifyError(self._stuck())
            if now is not None and (not wakes or now <= wakes[0][0]):
                network.advance(now)
            else:
                now = wakes[0][0]
                while wakes and wakes[0][0] == now:
                    self._go_on(heappop(wakes)[1], now)
            self._spread(now)
        outcome = self._outcome
        last = outcome.end_ps
        network.advance(last)
        outcome.state = network.state(last)
        outcome.moved = [*network.moved, *network.under_way(last)]
        return outcome

    def _spread(self, now: int) -> None:
        """Let those go on who waited for what has ended, and share out the links."""
        news = self._network.news
        while news:
            for index in self._blocked.pop(news.pop(0), ()):
                self._go_on(index, now)
        self._network.settle(now)

    def _go_on(self, index: int, now: int) -> None:
        """Run a stream's list until it waits, or launches something later than `now`."""
        stream, at, time = self._streams[index], self._at[index], self._now[index]
        starts, ended = self._outcome.starts[index], self._network.ended
        while at < len(stream):
            instruction = stream[at]
            if type(instruction) is Run:
                if instruction.waits:
                    missing = next((key for key in instruction.waits if key not in ended), None)
                    if missing is not None:
                        self._blocked.setdefault(missing, []).append(index)
                        break
                    time = self._waited(index, at, time, instruction.waits)
                starts.append(time)
                time = self._computed(index, at, time, instruction.ps)
            elif type(instruction) is Launch:
                if time > now:
                    heappush(self._wakes, (time, index))
                    break
                starts.append(time)
                self._network.launch(time, instruction)
            at += 1
        self._at[index], self._now[index] = at, time

    def _computed(self, index: int, at: int, start: int, ps: int) -> int:
        """When a run ends; notes by how much transfers beside it made it longer.

        Nobody else may launch anything meanwhile: transfers slow runs where there is one stream.
        """
        network, now, left = self._network, start, ps
        if not ps or len(self._streams) > 1 or not network.slowing:
            return start + ps
        while left:
            network.advance(now)
            slow = 1000 + network.slows
            needs = left * slow // 1000
            news = network.next_ps()
            if news is None or news >= now + needs:
                now += needs
                break
            left -= (news - now) * 1000 // slow
            now = news
        if now - start > ps:
            self._outcome.slowed[index].append((at, now - start - ps))
        return now

    def _waited(self, index: int, at: int, time: int, keys: tuple[str, ...]) -> int:
        """When a run can start; notes which transfer it waited for."""
        ended: Mapping[str, int] = self._network.ended
        last = max(keys, key=ended.__getitem__)
        if ended[last] > time:
            self._outcome.waited[index].append((at, last, ended[last] - time))
            return ended[last]
        return time

    def _stuck(self) -> str:
        index, at = min((i, self._at[i]) for waiting in self._blocked.values() for i in waiting)
        keys = ", ".join(sorted(self._blocked))
        return f"stream {index} waits at instruction {at}; nobody launches {keys}"
