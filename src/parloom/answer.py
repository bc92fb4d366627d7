"""The answer to a question, with what each thing that was asked for costs: the same question again
without it.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil

from parloom.candidates import Candidates, smallest
from parloom.changes import Origin, change, chosen, priced_changes
from parloom.choose import Choice, NothingFitsError, best_of, choose
from parloom.cost.holdings import holdings
from parloom.cost.ledger import ledger
from parloom.cost.step import priced
from parloom.cost.tasks import COMPONENTS
from parloom.cost.units import bytes_up, format_bytes
from parloom.errors import BudgetError, GapError, InfeasibleError, InputError, StoppedError
from parloom.ir.expected import Constraint, Objective, Status
from parloom.ir.factors import factorize
from parloom.ir.lower import lower
from parloom.ir.plan import DEVICES, Plan
from parloom.ir.regular_parts import check_on_any, memory_of
from parloom.objectives import rank
from parloom.report.instead import instead_words
from parloom.report.shortage import MOST, Shortage, shortage_document, shortage_text
from parloom.report.words import INTERRUPTED, constraint_line
from parloom.rewrite.rewrites import rewritten
from parloom.search.conflicts import broken, check_pins, smallest_conflict
from parloom.search.least import conflict
from parloom.search.pinned import clashes, resolve
from parloom.search.pins import Pin
from parloom.search.request import AUTO, Request, Say, ScoredPlan, Wanted, base_of

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
def answer(request: Request, origin: Origin, pins: Sequence[Pin], memory: str, say: Say) -> Choice:
    """The best plan, with `constraints` that say what each pin costs and, where `memory` says how
    much was asked for, that limit.

    Raises `InputError` for pins of what is not there, `InfeasibleError` where nothing holds them
    all, or nothing fits.
    """
    factored = factorize(request.graph)
    request = replace(request, pinned=resolve(pins, request.graph, factored))
    if request.method == AUTO:
        pinned = request.pinned
        check_on_any(request.cluster, lambda part: check_pins(pinned, factored, part))
    if clashes(request.pinned):
        raise conflict(request, base_of(request))
    try:
        found = choose(request, say)
    except NothingFitsError as error:
        found = _least(request, origin, error.proposed, say)
    return _constrained(request, origin, found, memory, say)


def _least(request: Request, origin: Origin, proposed: Candidates, say: Say) -> Choice:
    """The smallest plan, where it fits although the search under this limit found none that does.

    Raises `InfeasibleError` where it does not.
    """
    least: int | None = None
    if request.method == AUTO and not request.cluster.parts and request.pinned.allows_stages(1):
        say("nothing fits so far; looking for the smallest plan")
        try:
            small, least = smallest(request)
        except InputError:  # pins leave no plan on the meshes that are searched
            if not proposed.found:
                raise
        else:
            proposed = replace(proposed, found=(*proposed.found, small))
    if any(request.fits(plan.prediction) for plan in proposed.found):
        return best_of(request, proposed, say)
    if request.cluster.parts:
        raise InfeasibleError(_short_parts(request, proposed.found))
    raise _shortage(request, origin, proposed.found, least, say)


def _short_parts(request: Request, found: Sequence[ScoredPlan]) -> str:
    """What the plan of a mixed cluster holds whose memory is the nearest to what there is."""
    lines = [f"no plan fits on {request.cluster.name}"]

    def above(plan: ScoredPlan) -> float:
        return max(peak / request.limit_of(device) for device, peak in plan.prediction.peaks)

    for plan in sorted(found, key=above)[:1]:
        peaks = (
            f"{bytes_up(peak)} of {format_bytes(request.limit_of(device))} on {device}"
            for device, peak in plan.prediction.peaks
        )
        lines.append(f"the nearest found, {plan.name}, needs {', '.join(peaks)}")
    return "; ".join(lines)


def _shortage(
    request: Request, origin: Origin, found: Sequence[ScoredPlan], least: int | None, say: Say
) -> InfeasibleError:
    """What fills memory in the smallest plan, what would fit, and which pins are to blame."""
    request = replace(request, objective=Objective.TIME)
    small = min(found, key=lambda plan: plan.prediction.peak_bytes)
    shortage = replace(_filled(request, small, least), assumed=origin.assumed)
    if not origin.alone:
        text = f"no plan fits; {small.name} needs {bytes_up(small.prediction.peak_bytes)}"
        return InfeasibleError(f"{text} of {format_bytes(request.limit_bytes)} per device")
    size = bytes_up(small.prediction.peak_bytes)
    needed_mib = ceil(small.prediction.peak_bytes / MIB)
    flags, words = f"--memory {needed_mib}MiB", f"{size} are needed"
    say(f"nothing fits, {small.name} is the smallest: {size}; Ctrl-C ends pricing what would")
    possible = needed_mib * MIB <= memory_of(request.cluster)  # and not only with other devices
    changes = [change(flags, words, request, small)] if possible else []
    untried: tuple[str, ...] = ()
    not_enough: list[str] = []
    blamed: list[str] = []
    if origin.source.is_factory:
        untried = ("a smaller batch, which the factory has to make",)
    try:
        if possible:
            roomier = _roomier(replace(request, limit_bytes=needed_mib * MIB), small)
            changes = [change(flags, words, request, roomier)]
        for other in priced_changes(request, origin, say):
            if isinstance(other, str):
                not_enough.append(other)
            else:
                changes.append(other)
        blamed = _blamed(request)
    except (KeyboardInterrupt, StoppedError):
        untried = (*untried, "the rest: interrupted")
    changes.sort(key=lambda other: (other.device_s, other.flags))
    shortage = replace(
        shortage, changes=tuple(changes), not_enough=tuple(not_enough), untried=untried
    )
    text, document = shortage_text(shortage), shortage_document(shortage)
    if blamed:
        text += "\nwithout these pins a plan fits; give up one:" + "".join(
            f"\n  {pin}" for pin in blamed
        )
        document |= {"pins": blamed}
    return InfeasibleError(text, document)


def _roomier(request: Request, small: ScoredPlan) -> ScoredPlan:
    """The best plan with as much memory as `small` takes: that itself, or one that was found."""
    try:
        found = chosen(replace(request, wanted=Wanted.PRICE)).best
    except (InfeasibleError, InputError):
        return small
    return min(found, small, key=lambda plan: plan.prediction.step_s)


def _filled(request: Request, small: ScoredPlan, least: int | None) -> Shortage:
    """What a plan holds at the instant at which it holds most."""
    decisions, machine, optimizer = small.decisions, request.machine, request.optimizer
    if len(decisions.stages) > 1:  # by component: what runs then, and its tensors, are not kept
        held = {name: size for name, size in small.prediction.memory if size}
        memory = tuple(sorted(held.items(), key=lambda entry: -entry[1]))
        peak_bytes = small.prediction.peak_bytes
        return Shortage(request.limit_bytes, small.name, peak_bytes, memory, least_bytes=least)
    pcg = lower(rewritten(request.graph, decisions.rewrites), decisions)
    peak = ledger(machine.simulate(pcg, decisions, optimizer), pcg, machine.cluster).peak
    held = {name: size for name, size in zip(COMPONENTS, peak.held, strict=True) if size}
    found = priced(pcg, machine.cluster, decisions, optimizer, machine.kernels)
    tensors = [h for h in holdings(pcg, found) if h.num_bytes <= held.get(h.component, 0)]
    where = f"{peak.prefix}: {peak.name}" if peak.prefix else peak.name
    return Shortage(
        request.limit_bytes,
        small.name,
        small.prediction.peak_bytes,
        tuple(sorted(held.items(), key=lambda entry: -entry[1])),
        f"{where} ({peak.action})" if where else "",
        tuple(tensors[:MOST]),
        least,
    )


def _blamed(request: Request) -> list[str]:
    """Pins without which a plan fits, if one does: as few as there can be."""
    pins = request.pinned.pins
    if not pins or not _fits(request, ()):
        return []
    return [pin.text for pin in smallest_conflict(pins, lambda some: _fits(request, some))]


def _fits(request: Request, pins: Sequence[Pin]) -> bool:
    try:
        chosen(replace(request, pinned=request.pinned.only(pins), wanted=Wanted.PRICE))
    except (InfeasibleError, InputError):
        return False
    return True


def _constrained(request: Request, origin: Origin, found: Choice, memory: str, say: Say) -> Choice:
    """`found` with each pin and the best plan without it, then all pins, then the limit on memory;
    after Ctrl-C those that are still to be asked have no price.
    """
    pins, there = request.pinned.pins, memory_of(request.cluster)
    asked = [(pin.text, [p for p in pins if p is not pin], request) for pin in pins]
    if len(pins) > 1:
        asked.append((ALL, [], request))
    if memory and request.limit_bytes < there:
        asked.append((f"--memory {memory}", list(pins), replace(request, limit_bytes=there)))
    if origin.whole is not None:
        num_devices = request.cluster.num_devices
        other = replace(request, machine=origin.whole, all_devices=False)
        asked.append((f"{DEVICES}{num_devices}", list(pins), other))
    constraints, text, known = [], ALL, [found.best]
    unpriced = [Constraint(text) for text, *_ in asked if text != ALL]
    if found.status is Status.INTERRUPTED:
        return replace(found, constraints=tuple(unpriced))
    if asked:
        more = "another search" if len(asked) == 1 else f"{len(asked)} more searches"
        say(f"found {found.best.name}; what was asked for is priced by {more}: Ctrl-C ends that")
    try:
        # The best of all is the best without a pin, if it holds the others.
        free = _best_of(request, [], found.best) if len(pins) > 1 else None
        for text, kept, other in asked:
            plan = free if other is request else None
            if plan is None or broken(request.pinned.only(kept), request.graph, plan.decisions):
                plan = _best_of(other, kept, found.best)
            known.append(plan)
            # What holds a pin or a limit is a plan without it, too.
            others = known if not kept and other is request else [found.best, plan]
            made = _constraint(text, min(others, key=rank(request)))
            forbidden = [pin for pin in pins if pin.text == text]
            instead = instead_words(forbidden, plan.decisions.rewrites, found.best.decisions)
            constraints.append(replace(made, instead=instead))
            say(constraint_line(constraints[-1], found.best.prediction, found.aim))
    except (KeyboardInterrupt, StoppedError):
        line = f"what {text} costs is left out: {INTERRUPTED}"
        found = replace(found, notes=(line, *found.notes), status=Status.INTERRUPTED)
        priced = {constraint.text for constraint in constraints}
        constraints += (one for one in unpriced if one.text not in priced)
    return replace(found, constraints=tuple(constraints))


def _best_of(request: Request, pins: Sequence[Pin], found: ScoredPlan) -> ScoredPlan:
    """The best plan with fewer pins; `found` where a budget ends before one."""
    other = replace(request, pinned=request.pinned.only(pins), wanted=Wanted.PLAN)
    try:
        return chosen(other).best
    except (BudgetError, InfeasibleError):
        return found


def _constraint(text: str, best: ScoredPlan) -> Constraint:
    """With the best plan without it."""
    return Constraint(text, best.prediction.step_s, best.prediction.peak_bytes)


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
            " bound supposes that all overlaps (docs/explanation/search.md): ask for less"
            f"{', or a larger --budget' if spent else ''}"
        )
