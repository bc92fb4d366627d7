"""Zero-bubble schedules made for the times of a pipeline: ZB-1p and ZB-2p.

The heuristic of Qi et al. (ICLR'24, section 3.1): as many forward passes as memory allows before
the first backward pass, then one backward and one forward pass in turns; gradients of weights (W)
fill waits, and give memory back where the next forward pass needs it. Where its rules leave a
choice, all are tried, and the one with the shortest list is taken (section 3.1's grid search).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product

from parloom.errors import InputError
from parloom.ir.plan import Action
from parloom.ir.schedules import STEP, Lists


@dataclass(frozen=True, slots=True)
class PassTimes:
    """A stage's passes of one microbatch: their times and memory, in any units.

    `forward`, `backward` (gradients of inputs) and `weights` (gradients of weights) are times, the
    sends what it takes until a neighbor has what they made. `forward_bytes` (M_B) are held from F
    to B, and `backward_bytes` (M_W) of them until W.
    """

    forward: int
    backward: int
    weights: int
    send_forward: int = 0
    send_backward: int = 0
    forward_bytes: int = 1
    backward_bytes: int = 1


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the rules leave open.

    `most` activations that a stage holds; whether the last forward pass before the first backward
    pass may delay that (`delays`); whether a stage that is more than one forward pass ahead of the
    next one may skip a turn (`skips`); whether W follows B at once (`eager`: 1F1B, split).
    """

    most: int
    delays: bool = False
    skips: bool = False
    eager: bool = False


def zero_bubble(stages: Sequence[PassTimes], num_microbatches: int, times: int) -> Lists:
    """The action list of every rank, one a stage, under a memory limit of `times` that of 1F1B.

    A list is never longer than with a smaller limit, nor than 1F1B's, as far as messages do not
    share links. Raises `InputError` for numbers below 1.
    """
    ranks = len(stages)
    if min(ranks, num_microbatches, times) < 1:
        raise InputError(
            f"{ranks} stages, {num_microbatches} microbatches, {times} times the memory of 1F1B:"
            " all must be at least 1"
        )
    choices = [_Choices(ranks, eager=True)]
    for most in range(ranks, times * ranks + 1, ranks):
        choices += [_Choices(most, *open_) for open_ in product((False, True), repeat=2)]
    tried = (_Greedy(stages, num_microbatches, each) for each in choices)
    best = min(tried, key=_Greedy.play)
    return tuple((*listed, *STEP) for listed in best.lists)


class _Greedy:
    """Places the passes of all stages in the order of their times."""

    def __init__(self, stages: Sequence[PassTimes], microbatches: int, choices: _Choices) -> None:
        ranks = range(len(stages))
        self.stages, self.microbatches, self.choices = stages, microbatches, choices
        self.last = len(stages) - 1
        # How many forward passes a stage is ahead of its backward passes.
        self.ahead = self._ahead()
        self.lists: list[list[Action]] = [[] for _ in ranks]
        self.done: list[dict[str, int]] = [dict.fromkeys("FBW", 0) for _ in ranks]
        self.now = [0] * len(stages)
        self.begun: list[int] = [-1] * len(stages)
        self.idle, self.held = [0] * len(stages), [0] * len(stages)
        # When what a pass reads is there, by microbatch.
        self.there: dict[str, list[list[int]]] = {kind: [[] for _ in ranks] for kind in "FB"}
        self.queue: list[tuple[int, int]] = []
        self.queued: set[int] = set()

    def play(self) -> int:
        """Place all passes; the most time that a stage takes from its first to its last one."""
        self.there["F"][0] = [0] * self.microbatches
        for stage in range(len(self.stages)):
            self._enqueue(stage)
        while self.queue:
            _, stage = heappop(self.queue)
            self.queued.discard(stage)
            self._place(stage)
            for other in (stage, stage - 1, stage + 1):
                if 0 <= other <= self.last:
                    self._enqueue(other)
        for stage, done in enumerate(self.done):
            while done["W"] < done["B"]:
                self._run(stage, "W")
        return max(now - begun for now, begun in zip(self.now, self.begun, strict=True))

    def _ahead(self) -> list[int]:
        """How many forward passes each stage runs before its first backward pass."""
        if self.choices.eager:
            return [min(self.last - i + 1, self.microbatches) for i in range(len(self.stages))]
        ends: list[list[int]] = []  # of forward passes, where all stages only run these
        for index, stage in enumerate(self.stages):
            count = min(self.choices.most - index, self.microbatches)
            listed: list[int] = []
            free = sent = 0
            for microbatch in range(count):
                if index:
                    before = self.stages[index - 1]
                    sent = max(sent, ends[-1][microbatch]) + before.send_forward
                free = max(free, sent) + stage.forward
                listed.append(free)
            ends.append(listed)
        found = [1] * len(self.stages)
        comes = ends[-1][0] + self.stages[-1].backward
        for index in reversed(range(self.last)):
            stage = self.stages[index]
            comes += self.stages[index + 1].send_backward
            late = stage.forward if self.choices.delays else 1
            fits = sum(end - late < comes for end in ends[index])
            found[index] = min(max(fits, found[index + 1] + 1), len(ends[index]))
            comes = max(comes, ends[index][found[index] - 1]) + stage.backward
        return found

    def _next(self, stage: int) -> str:
        """Whether a forward or a backward pass is next; "" where none is left."""
        done = self.done[stage]
        if done["B"] == self.microbatches:
            return ""
        if done["F"] - done["B"] >= self.ahead[stage] or done["F"] == self.microbatches:
            return "B"
        if not (self.choices.skips and stage < self.last and done["B"]):
            return "F"
        # One turn less keeps the stage ahead of the next one.
        comes = self.there["B"][stage]
        waits = done["B"] >= len(comes) or comes[done["B"]] > self.now[stage]
        if waits or self.ahead[stage] - self.ahead[stage + 1] <= 1:
            return "F"
        self.ahead[stage] -= 1
        return "B"

    def _enqueue(self, stage: int) -> None:
        """Note when a stage's next pass can start, if that is known."""
        kind = self._next(stage) if stage not in self.queued else ""
        if kind and len(self.there[kind][stage]) > self.done[stage][kind]:
            comes = self.there[kind][stage][self.done[stage][kind]]
            heappush(self.queue, (max(comes, self.now[stage]), stage))
            self.queued.add(stage)

    def _place(self, stage: int) -> None:
        """The next pass of a stage, and in front of it what W there is time or need for."""
        kind, done, own = self._next(stage), self.done[stage], self.stages[stage]
        comes = self.there[kind][stage][done[kind]]
        while done["W"] < done["B"]:
            wait = comes - self.now[stage]
            full = self.held[stage] + own.forward_bytes > self.choices.most * own.forward_bytes
            longest = self.idle[stage] + wait > max(self.idle)
            fills = wait > 0 and (wait >= own.weights or longest)
            if not (fills or (kind == "F" and full)):
                break
            self._run(stage, "W")
        self.idle[stage] += max(0, comes - self.now[stage]) if self.begun[stage] >= 0 else 0
        self.now[stage] = max(self.now[stage], comes)
        self._run(stage, kind)
        if kind == "B" and self.choices.eager:
            self._run(stage, "W")

    def _run(self, stage: int, kind: str) -> None:
        own, done = self.stages[stage], self.done[stage]
        microbatch = done[kind]
        self.lists[stage].append(Action(kind, microbatch, stage))
        self.begun[stage] = self.now[stage] if self.begun[stage] < 0 else self.begun[stage]
        took = {"F": own.forward, "B": own.backward, "W": own.weights}[kind]
        self.now[stage] += took
        done[kind] += 1
        kept = own.backward_bytes
        self.held[stage] += {"F": own.forward_bytes, "B": kept - own.forward_bytes, "W": -kept}[
            kind
        ]
        if kind == "F" and stage < self.last:
            self._send(stage, "F", stage + 1, own.send_forward)
        elif kind == "B" and stage:
            self._send(stage, "B", stage - 1, own.send_backward)
        if kind == "F" and stage == self.last:
            self.there["B"][stage].append(self.now[stage])

    def _send(self, stage: int, kind: str, other: int, took: int) -> None:
        """One message after the other in each direction."""
        there = self.there[kind][other]
        there.append(max(self.now[stage], there[-1] if there else 0) + took)
