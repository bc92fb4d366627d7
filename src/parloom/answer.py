"""The answer to a question, with what each thing that was asked for costs: the same question again
without it.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil

from parloom.candidates import AUTO, Candidate, Candidates, smallest
from parloom.changes import change, chosen, priced_changes
from parloom.choose import Ask, NothingFitsError, Say, best_of, choose
from parloom.cost.holdings import holdings
from parloom.cost.ledger import ledger
from parloom.cost.step import priced
from parloom.cost.tasks import COMPONENTS
from parloom.cost.units import bytes_up
from parloom.errors import GapError, InfeasibleError, InputError
from parloom.ir.factors import factorize
from parloom.ir.lower import lower
from parloom.ir.plan import DEVICES, Constraint, Plan, Prediction, Status
from parloom.report.shortage import MOST, Shortage, shortage_document, shortage_text
from parloom.report.words import INTERRUPTED, constraint_line
from parloom.rewrite.rewrites import rewritten
from parloom.search.conflicts import broken, check_pins, smallest_conflict
from parloom.search.least import conflict
from parloom.search.pinned import clashes, resolve
from parloom.search.pins import Pin
from parloom.search.question import Wanted, base_of

ALL = "all of these"
MIB = 2**20


@contextmanager
def _uncollected() -> Iterator[None]:
    """No look for reference cycles: a search makes millions of values and hardly any cycle."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_uncollected()
def answer(ask: Ask, pins: Sequence[Pin], memory: str, say: Say) -> Plan:
    """The best plan, with `constraints` that say what each pin costs and, where `memory` says how
    much was asked for, that limit.

    Raises `InputError` for pins that cannot be held, `InfeasibleError` where nothing fits.
    """
    factored = factorize(ask.graph)
    ask = replace(ask, pinned=resolve(pins, ask.graph, factored))
    if _is_searched(ask):
        check_pins(ask.pinned, factored, ask.machine.cluster)
    if clashes(ask.pinned):
        raise conflict(ask.question, base_of(ask.question))
    try:
        found = choose(ask, say)
    except NothingFitsError as error:
        found = _least(ask, error, say)
    if found.interrupted:
        return found
    return _constrained(ask, found, memory, say)


def _is_searched(ask: Ask) -> bool:
    """Whether there is more than rules of thumb, on meshes of the search's own."""
    return ask.plan.method == AUTO


def _least(ask: Ask, error: NothingFitsError, say: Say) -> Plan:
    """The smallest plan, where it fits although the search under this limit found none that does.

    Raises `InfeasibleError` where it does not.
    """
    played, least = list(error.played), None
    if _is_searched(ask):
        say("nothing fits so far; looking for the smallest plan")
        try:
            small, least = smallest(ask.question)
        except InputError:  # pins leave no plan on the meshes that are searched
            if not played:
                raise
        else:
            assert small.prediction is not None, "it was simulated"
            played.append((small, small.prediction))
    others = tuple(replace(candidate, prediction=found) for candidate, found in played)
    if any(found.peak_bytes <= ask.limit for _, found in played):
        return best_of(replace(ask, plan=error.asked), Candidates(others), say)
    raise _shortage(ask, played, least, say)


def _shortage(
    ask: Ask, played: Sequence[tuple[Candidate, Prediction]], least: int | None, say: Say
) -> InfeasibleError:
    """What fills memory in the smallest plan, what would fit, and which pins are to blame."""
    candidate, prediction = min(played, key=lambda entry: entry[1].peak_bytes)
    shortage = _filled(ask, candidate, prediction, least)
    plan = replace(ask.plan, decisions=candidate.decisions, prediction=prediction)
    size = bytes_up(prediction.peak_bytes)
    needed_mib = ceil(prediction.peak_bytes / MIB)
    flags, words = f"--memory {needed_mib}MiB", f"devices with {size} of it"
    say(f"nothing fits, {candidate.name} is the smallest: {size}; Ctrl-C ends pricing what would")
    changes = [change(flags, words, ask, plan)]
    untried: tuple[str, ...] = ()
    blamed: list[str] = []
    if ask.plan.source.is_factory:
        untried = ("a smaller batch, which the factory has to make",)
    try:
        roomier = _roomier(replace(ask, limit=needed_mib * MIB), plan)
        changes = [change(flags, words, ask, roomier)]
        for found in priced_changes(ask, say):
            changes.append(found)
        blamed = _blamed(ask)
    except KeyboardInterrupt:
        untried = (*untried, "the rest: interrupted")
    changes.sort(key=lambda found: (found.device_s, found.flags))
    shortage = replace(shortage, changes=tuple(changes), untried=untried)
    text, document = shortage_text(shortage), shortage_document(shortage)
    if blamed:
        text += "\nwithout these pins a plan fits; give up one:" + "".join(
            f"\n  {pin}" for pin in blamed
        )
        document |= {"pins": blamed}
    return InfeasibleError(text, document)


def _roomier(ask: Ask, small: Plan) -> Plan:
    """The best plan with as much memory as `small` takes: that itself, or one that was found."""
    try:
        found = chosen(replace(ask, wanted=Wanted.PRICE))
    except (InfeasibleError, InputError):
        return small
    return min(found, small, key=_step_s)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def _filled(ask: Ask, candidate: Candidate, prediction: Prediction, least: int | None) -> Shortage:
    """What a plan holds at the instant at which it holds most."""
    decisions, cluster = candidate.decisions, ask.machine.cluster
    pcg = lower(rewritten(ask.graph, decisions.rewrites), decisions)
    timeline = ask.machine.simulate(pcg, decisions, ask.plan.optimizer)
    peak = ledger(timeline, pcg, cluster).peak
    held = {name: size for name, size in zip(COMPONENTS, peak.held, strict=True) if size}
    found = priced(pcg, cluster, decisions, ask.plan.optimizer, ask.machine.kernels)
    tensors = [h for h in holdings(pcg, found) if h.num_bytes <= held.get(h.component, 0)]
    where = f"{peak.prefix}: {peak.name}" if peak.prefix else peak.name
    return Shortage(
        ask.limit,
        candidate.name,
        prediction.peak_bytes,
        tuple(sorted(held.items(), key=lambda entry: -entry[1])),
        f"{where} ({peak.action})" if where else "",
        tuple(tensors[:MOST]),
        least,
    )


def _blamed(ask: Ask) -> list[str]:
    """Pins without which a plan fits, if one does: as few as there can be."""
    pins = ask.pinned.pins
    if not pins or not _fits(ask, ()):
        return []
    return [pin.text for pin in smallest_conflict(pins, lambda some: _fits(ask, some))]


def _fits(ask: Ask, pins: Sequence[Pin]) -> bool:
    try:
        chosen(replace(ask, pinned=ask.pinned.only(pins), wanted=Wanted.PRICE))
    except (InfeasibleError, InputError):
        return False
    return True


def _constrained(ask: Ask, found: Plan, memory: str, say: Say) -> Plan:
    """`found` with each pin and the best plan without it, then all pins, then the limit on memory;
    Ctrl-C leaves out what is still to be asked.
    """
    pins, there = ask.pinned.pins, ask.machine.cluster.device.memory_bytes
    asked = [(pin.text, [p for p in pins if p is not pin], ask) for pin in pins]
    if len(pins) > 1:
        asked.append((ALL, [], ask))
    if memory and ask.limit < there:
        asked.append((f"--memory {memory}", list(pins), replace(ask, limit=there)))
    if ask.whole is not None:
        num_devices = ask.machine.cluster.num_devices
        other = replace(ask, machine=ask.whole, whole=None)
        asked.append((f"{DEVICES}{num_devices}", list(pins), other))
    constraints, text, known = [], ALL, [found]
    try:
        # The best of all is the best without a pin, if it holds the others.
        free = _best_of(ask, [], found) if len(pins) > 1 else None
        for text, kept, other in asked:
            plan = free if other is ask else None
            if plan is None or broken(ask.pinned.only(kept), ask.graph, plan.decisions):
                plan = _best_of(other, kept, found)
            known.append(plan)
            # What holds a pin or a limit is a plan without it, too.
            others = known if not kept and other is ask else [found, plan]
            constraints.append(_constraint(text, others))
            say(constraint_line(constraints[-1], found))
    except KeyboardInterrupt:
        line = f"what {text} costs is left out: {INTERRUPTED}"
        found = replace(found, notes=(line, *found.notes), status=Status.INTERRUPTED)
    return replace(found, constraints=tuple(constraints))


def _best_of(ask: Ask, pins: Sequence[Pin], found: Plan) -> Plan:
    """The best plan for `ask` with fewer pins; `found` where a budget ends before one."""
    other = replace(ask, pinned=ask.pinned.only(pins), wanted=Wanted.PLAN)
    try:
        return chosen(other)
    except InfeasibleError:
        return found


def _constraint(text: str, plans: Sequence[Plan]) -> Constraint:
    """With the best of `plans`."""
    predictions = [plan.prediction for plan in plans if plan.prediction is not None]
    best = min(predictions, key=lambda p: p.step_s)
    return Constraint(text, best.step_s, best.peak_bytes)


def check_gap(plan: Plan, allowed: float | None) -> None:
    """Raise `GapError` where a plan is further above its bound than `allowed` of the bound."""
    if allowed is None:
        return
    gap = plan.gap
    if gap is None or gap > allowed:
        what = "no bound was proved" if gap is None else f"the gap is {gap:.3g}"
        spent = plan.status is Status.OUT_OF_BUDGET
        raise GapError(
            f"{what}, --require-gap is {allowed:g}; the plan is the best that was found, and its"
            " bound supposes that all overlaps (docs/space.md): ask for less"
            f"{', or a larger --budget' if spent else ''}"
        )
