"""A plan explained: what was decided for each kind of block, what it costs, and what bounds it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from parloom.cost.ledger import AGAIN, COMPUTING, MAIN, STEP, WAITING, Cause
from parloom.cost.tasks import COMPONENTS
from parloom.ir.mesh import MeshAxis
from parloom.ir.pcg import PParameter
from parloom.ir.plan import ParameterDecision, Storage
from parloom.ir.text import parse_graph
from parloom.report.case import Case
from parloom.report.costs import plan_cost_document
from parloom.report.memory import largest_tensors, recomputed
from parloom.report.words import constraint_lines, links_of, title_words, words

Document = dict[str, Any]
PS = 1e12
ALIKE = "as computed"


def plan_explained(case: Case, rewrites: Iterable[Document] = ()) -> Document:
    """All of it as JSON values; seconds, bytes and shares of the step."""
    ledger, plan, expensive = case.ledger, case.plan, _expensive(case)
    low, high = case.source.band(case.timeline.step_s)
    return {
        "title": title_words(plan, case.cluster),
        "model": plan.source.spec,
        "cluster": case.cluster.name,
        "num_devices": case.cluster.num_devices,
        "method": plan.method,
        "step_s": case.timeline.step_s,
        # A bound of measured rates says nothing of times from data sheets.
        "bound_s": None if case.warning else plan.bound_s,
        "source": {"name": case.source.name, "band_s": [low, high]},
        "num_microbatches": plan.decisions.num_microbatches,
        "mesh": [_axis(case, axis) for axis in case.mesh.axes],
        "words": list(words(parse_graph(plan.graph), plan.decisions, case.cluster)),
        "constraints": list(constraint_lines(plan)),
        "status": plan.status,
        "notes": list(plan.notes),
        "cost": plan_cost_document(plan, case.whole, case.timeline.step_s),
        "rewrites": list(rewrites),
        "time": [_cause(cause, ps, ledger.step_ps) for cause, ps in _largest(ledger.by_cause())],
        "bound_by": bound_words(case),
        "streams": [
            {"stream": name, "busy_s": ps / PS, "share": _share(ps, ledger.step_ps)}
            for name, ps in ledger.busy.items()
        ],
        "places": [_place(case, place) for place in case.variants],
        "parameters": list(_parameters(case)),
        "collectives": list(_collectives(case)),
        "peak": _peak(case),
        "recomputed": list(recomputed(case)),
        "expensive": expensive,
        "next": next((row["name"] for row in expensive if row["name"]), ""),
    }


def bound_words(case: Case) -> str:
    """What the step is bound by: the stream that is busiest, and what is waited for most."""
    ledger = case.ledger
    step = max(1, ledger.step_ps)
    stream, busy = max(ledger.busy.items(), key=lambda entry: entry[1], default=(COMPUTING, 0))
    waits = Counter({c: ps for c, ps in ledger.by_cause().items() if c.what == WAITING})
    if stream == COMPUTING:
        text = f"bound by computing: kernels run for {busy / step:.0%} of the step"
    else:
        text = f"bound by the links `{stream}`, which are busy for {busy / step:.0%} of the step"
    if not waits:
        return f"{text}; nothing is waited for"
    cause, ps = waits.most_common(1)[0]
    whole = sum(waits.values())
    most = f"most of it for {cause.transfer} ({cause.level}, {ps / step:.1%})"
    return f"{text}; {whole / step:.1%} is waiting, {most}"


def _axis(case: Case, axis: MeshAxis) -> Document:
    return {
        "axis": axis.name,
        "size": axis.size,
        "levels": list(links_of(case.decisions.mesh, axis, case.cluster.levels)),
    }


def _cause(cause: Cause, ps: int, step_ps: int) -> Document:
    return {
        "what": cause.what,
        "transfer": cause.transfer,
        "level": cause.level,
        "s": ps / PS,
        "ps": ps,
        "share": _share(ps, step_ps),
    }


def _place(case: Case, place: str) -> Document:
    """A block kind, or main: how often it runs, where its time goes, what its operators do."""
    ledger = case.ledger
    causes = Counter({c: ps for (p, c), ps in ledger.time.items() if p == place})
    kinds = {function.name for function in case.variants[place]}
    calls = [call for call in case.calls.values() if call.function in kinds]
    operators = _operators(case, place)
    listed = sum(row["own_s"] + row["moving_s"] for row in operators)
    return {
        "place": place,
        "calls": 1 if place == MAIN else len(calls),
        "recomputed": sum(call.policy == "recompute" for call in calls),
        "recompute_values": sum(
            case.pcg.by_name[call.function].remake is not None for call in calls
        ),
        "s": sum(causes.values()) / PS,
        "share": _share(sum(causes.values()), ledger.step_ps),
        "time": [_cause(cause, ps, ledger.step_ps) for cause, ps in _largest(causes)],
        "operators": operators,
        # Weights, gradients and queues; below zero where operators move beside computing.
        "others_s": _rest(sum(causes.values()) / PS, listed),
    }


def _rest(whole_s: float, listed_s: float) -> float:
    """What is left of a sum, and zero for what rounding leaves."""
    return 0.0 if abs(whole_s - listed_s) * PS < 1 else whole_s - listed_s


def _operators(case: Case, place: str) -> list[Document]:
    """All operators of a place with what each axis splits of them, the most expensive first."""
    computed: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for function in case.variants[place]:
        for share in case.shares[function.name]:
            ps = case.runs[function.name].ps(share)
            (computed if share.moves is None else moved)[share.key] += ps
    keys = sorted(computed, key=lambda key: -(computed[key] + moved[key]))
    return [
        {
            "key": key,
            "axes": {
                axis: [what for what, _ in found.most_common()]
                for axis, found in sorted(case.splits.get((place, key), {}).items())
            },
            "own_s": computed[key] / PS,
            "moving_s": moved[key] / PS,
            "share": _share(computed[key] + moved[key], case.ledger.step_ps),
        }
        for key in keys
    ]


def _parameters(case: Case) -> Iterator[Document]:
    """Parameters that are stored alike, by place, with the bytes of one device."""
    groups: dict[tuple[str, ...], list[PParameter]] = defaultdict(list)
    for parameter in case.pcg.parameters:
        split = ", ".join(parameter.layout.axes)
        stored = stored_words(parameter.decision).values()
        key = (case.place_of(parameter.input.target), split, *stored)
        groups[key].append(parameter)
    prices, mesh = case.priced.parameters, case.pcg.mesh
    for (place, split, weight, gradient, optimizer), members in groups.items():
        trained = [p for p in members if p.input.trainable]
        yield {
            "place": place,
            "count": len(members),
            "frozen": len(members) - len(trained),
            "split_over": split,
            "weight": weight,
            "gradient": gradient,
            "optimizer": optimizer,
            "whole_bytes": sum(p.input.value.spec.num_bytes for p in members),
            "weight_bytes": sum(
                p.elements(mesh, p.decision.weight) * prices.width(p) for p in members
            ),
            "gradient_bytes": sum(
                p.elements(mesh, p.decision.gradient) * prices.gradient_width(p) for p in trained
            ),
            "optimizer_bytes": sum(prices.state_bytes(p, "device") for p in trained),
        }


def stored_words(decision: ParameterDecision) -> dict[str, str]:
    """How weight, gradient and optimizer state lie, and what the first two are sent in."""
    sent = {"weight": decision.weight_sent, "gradient": decision.gradient_sent}
    return {
        role: storage_words(getattr(decision, role)) + (f", sent in {dtype}" if dtype else "")
        for role, dtype in (sent | {"optimizer": ""}).items()
    }


def storage_words(storage: Storage) -> str:
    """How a stored tensor lies beside its compute layout."""
    where = "" if storage.memory == "device" else f", in {storage.memory} memory"
    if not storage.axes:
        return ALIKE + where
    return f"in parts over {', '.join(storage.axes)} (dim {storage.dim}){where}"


def _collectives(case: Case) -> Iterator[Document]:
    """What is sent in a step, by kind, axes and level; what is waited for longest first."""
    for sent in sorted(case.ledger.sent, key=lambda sent: (-sent.waited_ps, -sent.ps, sent.group)):
        yield {
            "place": sent.group.place,
            "transfer": sent.group.transfer,
            "axes": sent.group.axes.split("+"),
            "level": sent.group.level,
            "count": sent.count,
            "bytes": sent.num_bytes,
            "s": sent.ps / PS,
            "waited_s": sent.waited_ps / PS,
        }


def _peak(case: Case) -> Document:
    """Memory at the instant at which most is held."""
    peak = case.ledger.peak
    return {
        "bytes": peak.num_bytes,
        "limit_bytes": case.limit,
        "device_bytes": case.cluster.device.memory_bytes,
        "action": peak.action,
        "module": peak.prefix,
        "operator": peak.name,
        "memory": dict(zip(COMPONENTS, peak.held, strict=True)),
        "largest": largest_tensors([case], peak.held),
    }


def _expensive(case: Case) -> list[Document]:
    """Single operators and movements by what they add to a step, the most expensive first."""
    found: Counter[tuple[str, str, str]] = Counter()
    for place, functions in case.variants.items():
        for function in functions:
            for share in case.shares[function.name]:
                ps = case.runs[function.name].ps(share)
                what = ""
                if share.moves is not None:
                    row, axes = share.moves
                    what = f"{row} of {share.roots[0]} over {', '.join(axes)}"
                found[place, share.key, what] += ps
    for (place, cause), ps in case.ledger.time.items():
        if place == STEP and cause.what not in (WAITING, AGAIN):
            found[STEP, cause.what, ""] += ps
    return [
        {"place": place, "key": key, "movement": movement, "s": ps / PS,
         "share": _share(ps, case.ledger.step_ps), "name": case.first_name(place, key)}
        for (place, key, movement), ps in found.most_common()
        if ps
    ]  # fmt: skip


def _largest(causes: Counter[Cause]) -> list[tuple[Cause, int]]:
    return sorted(causes.items(), key=lambda entry: (-entry[1], entry[0]))


def _share(ps: int, whole: int) -> float:
    return ps / whole if whole else 0.0
