"""A step over time: what each stream of a device does when, and the memory that it holds."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from parloom.cost.tasks import COMPONENTS
from parloom.cost.timeline import (
    MAX_INSTRUCTIONS,
    Process,
    Slice,
    Timeline,
    joined,
    sampled,
    slices,
)
from parloom.ir.lower_stages import group_lists
from parloom.ir.regular_parts import memory_of
from parloom.report.explain import PS
from parloom.report.gantt import pass_of
from parloom.report.memory import largest_tensors, recomputed
from parloom.report.page.sides import Side
from parloom.report.trace import ACTIONS
from parloom.report.words import memory_limit, process_names

Document = dict[str, Any]
# Slices of all processes together; of more, neighbors are drawn as one, named after the longest.
MOST_SLICES = 20_000
MORE = " and its neighbors"
PASSES = {
    "P": "prologue",
    "F": "forward pass",
    "B": "backward pass",
    "W": "gradients of weights",
    "U": "reduce and update",
}
# Points of a line of memory.
POINTS = 240
# Processes whose memory is drawn; of more, those that hold most.
MOST_PROCESSES = 32


class Words:
    """Texts by number, each written once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._known.setdefault(text, len(self._known))

    @property
    def all(self) -> list[str]:
        """In the order of their numbers."""
        return list(self._known)


def steps_view(side: Side) -> Document:
    """Slices of each stream: start and length in picoseconds, name and kind in `words`."""
    timeline, words = side.step.timeline, Words()
    names = process_names(side.plan.decisions)
    most = max(64, MOST_SLICES // len(timeline.processes))
    processes = [
        {"name": name, "tracks": list(_tracks(timeline, index, most, words))}
        for index, name in enumerate(names)
    ]
    return {
        "step_ps": timeline.step_ps,
        "bound_ps": timeline.bound_ps,
        "processes": processes,
        "observed": _observed(side, names, words),
        "words": words.all,
    }


def _observed(side: Side, names: Iterable[str], words: Words) -> Document | None:
    if side.observed is None:
        return None
    number, timeline = side.observed
    return {
        "step": number,
        "step_ps": timeline.step_ps,
        "processes": [
            {"name": name, "tracks": [_actions(process, words)]}
            for name, process in zip(names, timeline.processes, strict=True)
        ],
    }


def _tracks(timeline: Timeline, index: int, most: int, words: Words) -> Iterator[Document]:
    process = timeline.processes[index]
    yield _actions(process, words)
    tracks: dict[str, list[Slice]] = {track: [] for track in timeline.busy(index)}
    for part in (*joined(_parts(process, index)), *_messages(timeline, index)):
        tracks[part.track].append(part)
    drawn = {track: own for track, own in tracks.items() if own}
    for track, own in drawn.items():
        fewer = _fewer(sorted(own, key=lambda part: part.start_ps), most // len(drawn))
        slices_ = [[p.start_ps, p.end_ps - p.start_ps, words(p.name), words(p.kind)] for p in fewer]
        yield {"name": track, "slices": slices_}


def _parts(process: Process, index: int) -> Iterator[Slice]:
    """What runs inside actions, as far as that is not too much to be known."""
    yield from process.left
    if sum(span.played.num_instructions for span in process.spans) <= MAX_INSTRUCTIONS:
        for span in process.spans:
            yield from slices(span, index)


def _messages(timeline: Timeline, index: int) -> Iterator[Slice]:
    for m in timeline.messages:
        if m.sender == index:
            yield Slice(index, m.channel, m.name, "message", m.start_ps, m.end_ps)


def _actions(process: Process, words: Words) -> Document:
    spans = [
        [span.start_ps, span.played.ps, words(span.name), words(PASSES[pass_of(span.name)])]
        for span in process.spans
    ]
    return {"name": ACTIONS, "slices": spans}


def _fewer(parts: Sequence[Slice], most: int) -> Sequence[Slice]:
    """At most `most` of them, in order of time: neighbors as one, the shortest with the least
    between them first.
    """
    length = max(1, (parts[-1].end_ps - parts[0].start_ps) // (4 * most))
    while len(parts) > most:
        found, run = list[Slice](), list[Slice]()
        for part in parts:
            if run and part.end_ps - run[0].start_ps > length:
                found.append(_as_one(run))
                run = []
            run.append(part)
        parts, length = [*found, _as_one(run)], 2 * length
    return parts


def _as_one(run: Sequence[Slice]) -> Slice:
    """Neighbors by the name and kind of the longest of them."""
    longest = max(run, key=lambda part: part.end_ps - part.start_ps)
    name = longest.name if len(run) == 1 else f"{longest.name.removesuffix(MORE)}{MORE}"
    end_ps = max(part.end_ps for part in run)
    return replace(longest, name=name, start_ps=run[0].start_ps, end_ps=end_ps)


def device_limits(side: Side) -> list[int]:
    """What the plan may use of a device of each group."""
    step, cases = side.step, side.cases()
    devices = [cases[own[0]].cluster.device for own, _ in group_lists(side.plan.decisions)]
    return [memory_limit(side.plan, memory_of(step.cluster, device.name)) for device in devices]


def memory_view(side: Side) -> Document:
    """Bytes by component over the step, at the peak, and the largest tensors of each process."""
    timeline, names = side.step.timeline, process_names(side.plan.decisions)
    peaks = [process.peak_bytes for process in timeline.processes]
    order = sorted(range(len(peaks)), key=lambda index: -peaks[index])[:MOST_PROCESSES]
    lists = [own for own, _ in group_lists(side.plan.decisions)]
    limits = device_limits(side)
    cases = side.cases()
    found = []
    for index in sorted(order):
        memory = timeline.processes[index].memory
        found.append(
            {
                "name": names[index],
                "peak_bytes": memory.peak,
                "limit_bytes": limits[index],
                "at_peak": dict(zip(COMPONENTS, memory.at_peak, strict=True)),
                "lines": sampled(timeline, index, POINTS),
                "largest": largest_tensors([cases[i] for i in lists[index]], memory.at_peak),
            }
        )
    peak = side.step.ledger.peak
    return {
        "components": list(COMPONENTS),
        "during": {"action": peak.action, "module": peak.prefix, "operator": peak.name},
        "step_s": timeline.step_ps / PS,
        "processes": found,
        "recomputed": [
            {"stage": i} | own for i, case in enumerate(cases) for own in recomputed(case)
        ],
        "left_out": len(peaks) - len(order),
    }
