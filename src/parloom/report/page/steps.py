"""A step over time: what each stream of a device does when, and the memory that it holds."""

from collections.abc import Iterable, Iterator
from typing import Any

from parloom.cost.holdings import holdings
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
from parloom.report.page.sides import Side
from parloom.report.trace import ACTIONS
from parloom.report.words import memory_limit, process_names

Document = dict[str, Any]
# Slices of all processes together; of more, neighbors of one kind are drawn as one.
MOST_SLICES = 20_000
# Points of a line of memory, and tensors that are listed.
POINTS, LARGEST = 240, 12
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
    messages = [
        [m.sender, m.receiver, m.start_ps, m.end_ps, words(m.name)]
        for m in timeline.messages[:MOST_SLICES]
    ]
    return {
        "step_ps": timeline.step_ps,
        "bound_ps": timeline.bound_ps,
        "processes": processes,
        "messages": messages,
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
    count = sum(span.played.num_instructions for span in process.spans)
    parts = list(process.left)
    if count <= MAX_INSTRUCTIONS:
        parts += [part for span in process.spans for part in slices(span, index)]
    tracks: dict[str, list[Slice]] = {}
    for part in joined(parts):
        tracks.setdefault(part.track, []).append(part)
    for track, own in sorted(
        tracks.items(), key=lambda item: list(timeline.busy(index)).index(item[0])
    ):
        own.sort(key=lambda part: part.start_ps)
        yield {
            "name": track,
            "slices": [
                [part.start_ps, part.end_ps - part.start_ps, words(part.name), words(part.kind)]
                for part in _fewer(own, most // max(1, len(tracks)), timeline.step_ps)
            ],
        }


def _actions(process: Process, words: Words) -> Document:
    spans = [
        [span.start_ps, span.played.ps, words(span.name), words("action")] for span in process.spans
    ]
    return {"name": ACTIONS, "slices": spans}


def _fewer(parts: list[Slice], most: int, step_ps: int) -> list[Slice]:
    """At most about `most` of them: short neighbors of one kind as one, of more and more length."""
    length = step_ps // max(1, most)
    while len(parts) > most:
        found = list[Slice]()
        for part in parts:
            last = found[-1] if found else None
            if last and last.kind == part.kind and part.end_ps - last.start_ps <= length:
                name = last.name if last.name.endswith(" ...") else f"{last.name} ..."
                found[-1] = Slice(
                    last.process, last.track, name, last.kind, last.start_ps, part.end_ps
                )
            else:
                found.append(part)
        if len(found) == len(parts) and length > step_ps:
            return found
        parts, length = found, 2 * length
    return parts


def memory_view(side: Side) -> Document:
    """Bytes by component over the step, at the peak, and the largest tensors of each process."""
    timeline, names = side.step.timeline, process_names(side.plan.decisions)
    peaks = [process.peak_bytes for process in timeline.processes]
    order = sorted(range(len(peaks)), key=lambda index: -peaks[index])[:MOST_PROCESSES]
    lists = [own for own, _ in group_lists(side.plan.decisions)]
    cases = side.cases()
    found = []
    for index in sorted(order):
        memory = timeline.processes[index].memory
        held = [h for i in lists[index] for h in holdings(cases[i].pcg, cases[i].priced)]
        held.sort(key=lambda h: -h.num_bytes)
        found.append(
            {
                "name": names[index],
                "peak_bytes": memory.peak,
                "at_peak": dict(zip(COMPONENTS, memory.at_peak, strict=True)),
                "lines": sampled(timeline, index, POINTS),
                "largest": [
                    {
                        "component": h.component,
                        "name": h.name,
                        "count": h.count,
                        "bytes": h.num_bytes,
                    }
                    for h in held[:LARGEST]
                ],
            }
        )
    peak = side.step.ledger.peak
    return {
        "components": list(COMPONENTS),
        "limit_bytes": memory_limit(side.plan, memory_of(side.step.cluster)),
        "device_bytes": memory_of(side.step.cluster),
        "during": {"action": peak.action, "module": peak.prefix, "operator": peak.name},
        "step_s": timeline.step_ps / PS,
        "processes": found,
        "left_out": len(peaks) - len(order),
    }
