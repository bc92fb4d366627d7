"""The answer to a question, with what each thing that was asked for costs: the same question again
without it.
"""

from collections.abc import Sequence
from dataclasses import replace

from parloom.choose import Ask, Say, choose
from parloom.errors import InfeasibleError, InputError
from parloom.ir.factors import factorize
from parloom.ir.plan import Constraint, Plan
from parloom.report.words import constraint_line
from parloom.search.candidates import AUTO, base_of
from parloom.search.conflicts import check_pins, smallest_conflict
from parloom.search.least import conflict
from parloom.search.meshes import logical_meshes
from parloom.search.pinned import clashes, resolve
from parloom.search.pins import Pin

ALL = "all of these"


def answer(ask: Ask, pins: Sequence[Pin], memory: str, say: Say) -> Plan:
    """The best plan, with `constraints` that say what each pin costs and, where `memory` says how
    much was asked for, that limit.

    Raises `InputError` for pins that cannot be held, `InfeasibleError` where nothing fits.
    """
    factored = factorize(ask.graph)
    ask = replace(ask, pinned=resolve(pins, ask.graph, factored))
    if ask.plan.method == AUTO:
        check_pins(ask.pinned, factored, tuple(logical_meshes(ask.machine.cluster)))
    if clashes(ask.pinned):
        raise conflict(ask.question, base_of(ask.question))
    try:
        found = choose(ask, say)
    except InfeasibleError as error:
        raise _because(ask, error) from None
    if found.interrupted:
        return found
    return replace(found, constraints=_constraints(ask, found, memory, say))


def _because(ask: Ask, error: InfeasibleError) -> InfeasibleError:
    """Says which pins leave nothing that fits, where without them something does."""
    pins = ask.pinned.pins
    if not pins or not _fits(ask, ()):
        return error
    needed = smallest_conflict(pins, lambda some: _fits(ask, some))
    lines = "".join(f"\n  {pin.text}" for pin in needed)
    text = f"{error}\nwithout these pins a plan fits; give up one:{lines}"
    document = {**error.document, "pins": [pin.text for pin in needed]}
    return InfeasibleError(text, document)


def _fits(ask: Ask, pins: Sequence[Pin]) -> bool:
    try:
        choose(replace(ask, pinned=ask.pinned.only(pins)), _silent)
    except (InfeasibleError, InputError):
        return False
    return True


def _constraints(ask: Ask, found: Plan, memory: str, say: Say) -> tuple[Constraint, ...]:
    """Each pin with the best plan without it, then all pins, then the limit on memory."""
    pins = ask.pinned.pins
    without = [
        (pin.text, replace(ask, pinned=ask.pinned.only([p for p in pins if p is not pin])))
        for pin in pins
    ]
    if len(pins) > 1:
        without.append((ALL, replace(ask, pinned=ask.pinned.only(()))))
    there = ask.machine.cluster.device.memory_bytes
    if memory and ask.limit < there:
        without.append((f"--memory {memory}", replace(ask, limit=there)))
    constraints = []
    try:
        for text, other in without:
            constraints.append(_constraint(text, found, choose(other, _silent)))
            say(constraint_line(constraints[-1], found))
    except KeyboardInterrupt:
        say(f"what {text} costs is left out: interrupted")
    return tuple(constraints)


def _constraint(text: str, found: Plan, other: Plan) -> Constraint:
    """A plan that holds a constraint is one of those without it, too."""
    assert found.prediction is not None
    assert other.prediction is not None
    best = min(found.prediction, other.prediction, key=lambda p: p.step_s)
    return Constraint(text, best.step_s, best.peak_bytes)


def _silent(text: str) -> None:
    """Drop progress messages."""
