"""List scheduling of pipelines whose stages form any directed acyclic graph, several to a rank.

Whenever a rank is idle it runs a pass that can run (Graham, SIAM J. Appl. Math. 17, 1969), the
oldest microbatch first: backward before forward passes, or both in turns; gradients of weights (W)
fill waits. Forward passes stop where a rank has so many microbatches in flight: by Little's law
(Operations Research 9, 1961) each stage needs as many as its round trip takes periods of the
slowest rank, and as passes queue on ranks with several stages, multiples of that are tried. The
shortest lists are kept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf

from parloom.action_text import passes_beside
from parloom.errors import InputError
from parloom.ir.plan import Action
from parloom.ir.schedules import STEP, Lists
from parloom.ir.zero_bubble import PassTimes

# Multiples of the microbatches in flight that Little's law asks for.
MULTIPLES = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0)


@dataclass(frozen=True, slots=True)
class Link:
    """How long what stage `source` makes takes to `target` after F, and its gradient back after B:
    None where there is none.
    """

    source: int
    target: int
    forward: int = 0
    backward: int | None = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """Action lists, and when the last pass ends."""

    lists: Lists
    makespan: int


def list_schedule(
    stages: Sequence[PassTimes],
    links: Sequence[Link],
    rank_of: Sequence[int],
    num_microbatches: int,
    *,
    at_once: Sequence[int] = (),
    split: bool = False,
    limits_bytes: Sequence[int] | None = None,
) -> Listed | None:
    """The shortest action lists that are found, one for each rank; None where a rank cannot hold
    one microbatch in all of its stages.

    `rank_of` are the ranks of the stages, numbered by their first stage; `at_once`: how many of the
    microbatches each stage runs in one pass, if not one; with `split` gradients of weights are
    passes of their own. `limits_bytes`: what the activations of each rank may take.
    Raises `InputError` for numbers below 1 and for a link to an earlier stage.
    """
    if min(len(stages), num_microbatches) < 1 or any(e.source >= e.target for e in links):
        raise InputError(
            f"{len(stages)} stages, {num_microbatches} microbatches: both must be at least 1, and"
            " links lead to later stages"
        )
    counts = [num_microbatches // own for own in at_once or [1] * len(stages)]
    needed = _in_flight(stages, links, rank_of, counts)
    caps = {tuple(ceil(times * each) for each in needed): None for times in MULTIPLES}
    best: Listed | None = None
    for turns in (True, False):
        for each in caps:
            greedy = _Greedy(stages, links, rank_of, counts, each, turns, split, limits_bytes)
            best = greedy.play(best.makespan if best else inf) or best
            if not greedy.was_capped:  # larger caps change nothing
                break
    return best


def _in_flight(
    stages: Sequence[PassTimes],
    links: Iterable[Link],
    rank_of: Sequence[int],
    counts: Sequence[int],
) -> list[float]:
    """How many microbatches each rank needs in flight: the round trips from its stages, in periods
    of the slowest rank.
    """
    busy, most = [0.0] * (max(rank_of) + 1), max(counts)
    for stage, rank, count in zip(stages, rank_of, counts, strict=True):
        busy[rank] += (stage.forward + stage.backward + stage.weights) * count / most
    trips = [stage.forward + stage.backward for stage in stages]
    for link in sorted(links, key=lambda e: e.target, reverse=True):
        own = stages[link.source]
        beyond = link.forward + trips[link.target] + (link.backward or 0)
        trips[link.source] = max(trips[link.source], own.forward + beyond + own.backward)
    found = [0.0] * len(busy)
    for trip, rank, count in zip(trips, rank_of, counts, strict=True):
        # What runs several at once waits for all of them.
        least = count // min(counts) if count > min(counts) else 0
        found[rank] += max(trip / max(1.0, *busy) * count / most, least)
    return found


class _Greedy:
    """Runs passes as ranks become idle, with at most so many microbatches in flight on each."""

    def __init__(
        self,
        stages: Sequence[PassTimes],
        links: Sequence[Link],
        rank_of: Sequence[int],
        counts: Sequence[int],
        caps: Sequence[int],
        turns: bool,
        split: bool,
        limits_bytes: Sequence[int] | None,
    ) -> None:
        count, ranks = len(stages), max(rank_of) + 1
        self.stages, self.rank_of, self.counts = stages, rank_of, counts
        # By which microbatches of the step passes are ordered.
        self.sizes = [max(counts) // own for own in counts]
        self.caps, self.turns, self.split, self.limits = caps, turns, split, limits_bytes
        self.own: list[list[int]] = [[] for _ in range(ranks)]
        # What a rank keeps free for the later stages of a microbatch, so that the oldest one ends:
        # how many, and their bytes.
        self.reserved = [(0, 0)] * count
        for stage in reversed(range(count)):
            later = self.own[rank_of[stage]]
            self.reserved[stage] = len(later), sum(stages[s].forward_bytes for s in later)
            later.insert(0, stage)
        # What one backward pass makes a rank hold more, until its gradients of weights are made.
        self.grows = [max(0, *(self._growth(stage) for stage in own)) for own in self.own]
        self.in_flight = [0] * ranks
        self.sends: dict[str, list[list[tuple[int, int]]]] = {
            k: [[] for _ in stages] for k in "FBW"
        }
        reads = {"F": [0] * count, "B": [1] * count}
        for link in links:
            a, b = link.source, link.target
            self.sends["F"][a].append((b, link.forward))
            reads["F"][b] += max(1, counts[a] // counts[b])
            if link.backward is not None:
                self.sends["B"][b].append((a, link.backward))
                reads["B"][a] += max(1, counts[b] // counts[a])
        # Of each pass, how many of what it reads are not under way, and when the rest is there.
        self.missing = {
            k: [[n] * own for n, own in zip(reads[k], counts, strict=True)] for k in "FB"
        }
        self.there = {k: [[0] * own for own in counts] for k in "FB"}
        self.done = {kind: [0] * count for kind in "FBW"}
        self.lists: list[list[Action]] = [[] for _ in range(ranks)]
        self.free, self.held = [0] * ranks, [0] * ranks
        # What the passes of each rank take that have not run.
        self.left = [
            sum(self._pass_time(stage) * counts[stage] for stage in own) for own in self.own
        ]
        self.sent: dict[tuple[int, int, str], int] = {}
        self.queue: list[tuple[int, int]] = [(0, rank) for rank in range(ranks)]
        self.was_capped = False

    def _pass_time(self, stage: int) -> int:
        own = self.stages[stage]
        return own.forward + own.backward + (own.weights if self.split else 0)

    def _growth(self, stage: int) -> int:
        own = self.stages[stage]
        return (own.backward_bytes if self.split else 0) - own.forward_bytes

    def play(self, enough: float = inf) -> Listed | None:
        """All passes in the order of time; None where ranks are left that wait for memory, and
        where the makespan is not below `enough`.
        """
        while self.queue:
            now, rank = heappop(self.queue)
            chosen = self._choose(rank, now) if self.free[rank] <= now else None
            if chosen is not None:
                self._run(rank, *chosen, now)
                if self.free[rank] + self.left[rank] >= enough:
                    return None
        last = self.done["W" if self.split else "B"]
        if any(done < own for done, own in zip(last, self.counts, strict=True)):
            return None
        return Listed(tuple((*listed, *STEP) for listed in self.lists), max(self.free))

    def _choose(self, rank: int, now: int) -> tuple[str, int] | None:
        """The pass of an idle rank: its kind and its stage."""
        soon = now
        turn = self.turns and bool(self.lists[rank]) and self.lists[rank][-1].kind != "F"
        for kind in "FB" if turn else "BF":
            best: tuple[int, int] | None = None
            for stage in self.own[rank]:
                microbatch = self.done[kind][stage]
                if microbatch == self.counts[stage] or self.missing[kind][stage][microbatch]:
                    continue
                if kind == "F" and not self._may_enter(rank, stage):
                    continue
                comes = self.there[kind][stage][microbatch]
                if comes > now:
                    soon = comes if soon == now else min(soon, comes)
                elif best is None or (microbatch * self.sizes[stage], -stage) < best:
                    best = microbatch * self.sizes[stage], -stage
            if best is not None:
                if kind == "B" and not self._has_room(rank, -best[1]):
                    break
                return kind, -best[1]
        waiting = [s for s in self.own[rank] if self.done["W"][s] < self.done["B"][s]]
        if not self.split or not waiting:
            return None
        stage = min(waiting, key=lambda s: (self.done["W"][s], s))
        if best is not None:
            return "W", stage
        # One that is about to come would wait for longer than the rank does.
        if now < soon < now + self.stages[stage].weights / 2:
            return None
        return "W", stage

    def _may_enter(self, rank: int, stage: int) -> bool:
        later, later_bytes = self.reserved[stage]
        if self.in_flight[rank] + 1 + later > max(self.caps[rank], len(self.own[rank])):
            self.was_capped = True
            return False
        more = self.stages[stage].forward_bytes + later_bytes + self.grows[rank]
        return self.limits is None or self.held[rank] + more <= self.limits[rank]

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether the gradients of weights that wait leave room for a backward pass. Where none
        waits there is: forward passes keep it.
        """
        if self.limits is None:
            return True
        return self.held[rank] + self._growth(stage) <= self.limits[rank]

    def _run(self, rank: int, kind: str, stage: int, now: int) -> None:
        own, microbatch = self.stages[stage], self.done[kind][stage]
        kept = own.backward_bytes if self.split else 0
        self.lists[rank].append(Action(kind, microbatch, stage))
        self.done[kind][stage] += 1
        if kind == "F":
            end, change = now + own.forward, own.forward_bytes
            self._arrive("B", stage, microbatch, end)
        elif kind == "B":
            end, change = now + own.backward, kept - own.forward_bytes
        else:
            end, change = now + own.weights, -kept
        self.held[rank] += change
        self.in_flight[rank] += (kind == "F") - (kind == ("W" if self.split else "B"))
        self.left[rank] -= end - now
        self.free[rank] = end
        heappush(self.queue, (end, rank))
        for other, took in self.sends[kind][stage]:
            peer, comes = self.rank_of[other], end
            for beside in passes_beside(microbatch, self.counts[stage], self.counts[other]):
                if peer != rank:  # one message after the other in each direction
                    comes = max(end, self.sent.get((rank, peer, kind), 0)) + took
                    self.sent[rank, peer, kind] = comes
                self._arrive(kind, other, beside, comes)

    def _arrive(self, kind: str, stage: int, microbatch: int, when: int) -> None:
        there = self.there[kind][stage]
        there[microbatch] = max(there[microbatch], when)
        self.missing[kind][stage][microbatch] -= 1
        heappush(self.queue, (there[microbatch], self.rank_of[stage]))
