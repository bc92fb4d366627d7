"""The calls to come, as far as counters say which way they go.

A traced call is a path: it is taken by every call that finds numbers of which everything that was
read has the same outcome, and everything else as it was. What it makes of the numbers is known as
terms, so calls are followed without tracing until one takes no known path.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parloom.capture.state.numbers import Reads, Term

STEPS = 300_000  # terms that are computed
# Calls to look at beyond those that are followed, where numbers go on evenly.
FAR = (*sorted({int(1.25**n) for n in range(1, 100)}),)
LONGEST = 4096  # bits of an integer that is followed


@dataclass(frozen=True, slots=True)
class State:
    """What a call finds: numbers, and all else that calls change, as a value that compares."""

    values: Mapping[int, Any]
    rest: object

    @property
    def is_followed(self) -> bool:
        """Whether numbers are not too large to compute with."""
        return all(not isinstance(v, int) or v.bit_length() < LONGEST for v in self.values.values())


@dataclass(frozen=True, slots=True)
class Path:
    """One traced call: what it found, what it read of it, and what it left."""

    found: State
    reads: Reads
    terms: Mapping[int, Term]
    rest: object

    def takes(self, state: State) -> bool:
        """Whether a call that finds this state goes the same way."""
        return (
            state.rest == self.found.rest
            and state.values.keys() == self.found.values.keys()
            and state.is_followed
            and self.reads.hold(state.values)
        )

    @property
    def is_closed(self) -> bool:
        """Whether all calls after it take it again."""
        same = self.rest == self.found.rest and self.terms.keys() == self.found.values.keys()
        return same and not self.reads.found

    def after(self, state: State) -> State:
        """What the call leaves."""
        return State({n: term(state.values) for n, term in self.terms.items()}, self.rest)


@dataclass(slots=True)
class Paths:
    """All paths that were traced."""

    known: list[Path] = field(default_factory=list)
    steps: int = STEPS

    def taken(self, state: State) -> Path | None:
        """The path of a call that finds this state, if it was traced."""
        return next((path for path in reversed(self.known) if path.takes(state)), None)

    def unknown(self, state: State) -> tuple[State, int] | None:
        """The first call from `state` on that takes no known path, and how many come before it.

        None where all calls take known paths, as far as they are followed.
        """
        mark, power, calls = state, 1, 0
        while True:
            path = self.taken(state)
            if path is None:
                return state, calls
            if path.is_closed:
                return None
            before = state
            try:
                state = path.after(before)
            except (ArithmeticError, ValueError, TypeError):
                return before, calls
            calls += 1
            if state == mark:
                return None  # from here on everything comes again
            if calls == power:
                mark, power = state, 2 * power
            self.steps -= 1 + len(path.reads.found) + len(path.terms)
            if self.steps < 0:
                found = next((s for s in self.beyond(before, state) if not self.taken(s)), None)
                return None if found is None else (found, calls + 1)

    def beyond(self, before: State, state: State) -> Iterator[State]:
        """States far ahead, if numbers go on as they went: where comparisons turn, and others."""
        if before.rest != state.rest or before.values.keys() != state.values.keys():
            return
        steps = {n: value - before.values[n] for n, value in state.values.items()}

        def ahead(calls: int) -> State:
            return State({n: v + steps[n] * calls for n, v in state.values.items()}, state.rest)

        for gap in (gap for path in self.known for gap in path.reads.gaps):
            try:
                now, then = gap(state.values), gap(ahead(1).values)
                turn = int(now / (now - then)) if now != then else 0
            except (ArithmeticError, ValueError, TypeError, LookupError):
                continue
            yield from (ahead(turn + around) for around in (-1, 0, 1) if turn + around > 0)
        yield from map(ahead, FAR)
