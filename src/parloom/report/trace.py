"""A simulated step as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Devices are processes; a track each for actions, the compute stream and every channel; memory is a
counter with one series per component; messages between devices are arrows. A step that was observed
has actions alone, beside the simulated ones. The format: Trace Event
Format, "JSON Object Format" (Google, document 1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from parloom.cost.tasks import COMPONENTS
from parloom.cost.timeline import Process, Slice, Span, Timeline, joined, memory_line, slices

Event = dict[str, Any]

ACTIONS = "actions"
# Operators of later actions are left out beyond this: viewers take some hundreds of thousands.
MAX_EVENTS = 200_000


def chrome_trace(
    timeline: Timeline,
    names: Sequence[str],
    observed: Timeline | None = None,
    max_events: int = MAX_EVENTS,
) -> str:
    """The trace as JSON text; `names` are the processes', in a step that was `observed`, too. Times
    are in microseconds.

    Actions always appear; operators, transfers and memory inside them as long as there are no more
    than about `max_events` of these.
    """
    left = max_events // len(timeline.processes)
    events: list[Event] = []
    for index, (process, name) in enumerate(zip(timeline.processes, names, strict=True)):
        tracks = [ACTIONS, *timeline.busy(index)]
        events += _labels(index, name, tracks, 2 * index)
        events += _process(index, process, tracks, left)
    for index, process in enumerate(observed.processes if observed else ()):
        number = len(timeline.processes) + index
        events += _labels(number, f"{names[index]}, observed", [ACTIONS], 2 * index + 1)
        events += (
            _slice(number, 0, span.name, "action", span.start_ps, span.played.ps)
            for span in process.spans
        )
    events += _messages(timeline)
    events.sort(key=lambda event: event.get("ts", -1.0))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _labels(index: int, name: str, tracks: list[str], place: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": index, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": index, "name": "process_sort_index", "args": {"sort_index": place}}
    for number, track in enumerate(tracks):
        where = {"ph": "M", "pid": index, "tid": number}
        yield where | {"name": "thread_name", "args": {"name": track}}
        yield where | {"name": "thread_sort_index", "args": {"sort_index": number}}


def _process(index: int, process: Process, tracks: list[str], left: int) -> Iterator[Event]:
    numbers = {track: number for number, track in enumerate(tracks)}
    held = list(process.base)
    yield _counter(index, 0, held)
    parts: list[Slice] = list(process.left)
    for span in process.spans:
        yield _slice(index, numbers[ACTIONS], span.name, "action", span.start_ps, span.played.ps)
        inside = span.played.num_instructions
        left -= inside
        if inside and left >= 0:
            parts += slices(span, index)
        yield from _memory(index, process, span, held, detailed=bool(inside) and left >= 0)
    for part in joined(parts):
        number = numbers[part.track]
        ps = part.end_ps - part.start_ps
        yield _slice(index, number, part.name, part.kind, part.start_ps, ps)


def _memory(
    index: int, process: Process, span: Span, held: list[int], detailed: bool
) -> Iterator[Event]:
    """Counter events; without detail, the most of an action at its start and what stays at its end.

    `held` is brought to what is held after the action.
    """
    memory, end = span.played.memory, span.start_ps + span.played.ps
    if detailed:
        now, last = None, 0
        for when, component, size in memory_line(span):
            # The most of an instant is shown, too.
            if now is not None and (when != now or size < 0 < last):
                yield _counter(index, now, held)
            held[component] += size
            now, last = when, size
        if now is not None:
            yield _counter(index, now, held)
        return
    if any(memory.peaks) or any(memory.net):
        most = [have + peak for have, peak in zip(held, memory.peaks, strict=True)]
        yield _counter(index, span.start_ps, most)
        held[:] = [have + net for have, net in zip(held, memory.net, strict=True)]
        yield _counter(index, end, held)


def _messages(timeline: Timeline) -> Iterator[Event]:
    """A slice on the sender's channel, and an arrow to the action that waits for the message."""
    tracks = [[ACTIONS, *timeline.busy(i)] for i in range(len(timeline.processes))]
    for number, message in enumerate(timeline.messages):
        track = tracks[message.sender].index(message.channel)
        ps = message.end_ps - message.start_ps
        yield _slice(message.sender, track, message.name, "message", message.start_ps, ps)
        arrow = {"cat": "message", "name": message.name, "id": number}
        yield arrow | {
            "ph": "s", "pid": message.sender, "tid": track, "ts": message.start_ps / 1e6
        }  # fmt: skip
        yield arrow | {
            "ph": "f", "bp": "e", "pid": message.receiver, "tid": 0, "ts": message.used_ps / 1e6
        }  # fmt: skip


def _slice(index: int, track: int, name: str, kind: str, start_ps: int, ps: int) -> Event:
    return {
        "ph": "X",
        "pid": index,
        "tid": track,
        "name": name,
        "cat": kind,
        "ts": start_ps / 1e6,
        "dur": ps / 1e6,
    }


def _counter(index: int, when: int, held: Sequence[int]) -> Event:
    series = dict(zip(COMPONENTS, held, strict=True))
    return {"ph": "C", "pid": index, "name": "memory", "ts": when / 1e6, "args": series}
