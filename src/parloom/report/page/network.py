"""Devices, links and traffic: which mesh axis crosses which level, and who sends to whom."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parloom.cost.ledger import HOST, Ledger, Program, Sent, pipeline_ledger
from parloom.cost.stages import transfer_bytes
from parloom.ir.lower_stages import group_lists
from parloom.ir.mesh import Level, Mesh
from parloom.ir.regular_parts import joined, regular_parts
from parloom.report.case import PipelineCase, Step
from parloom.report.explain import PS
from parloom.report.page.sides import Side
from parloom.report.words import device_words, links_of, process_names

Document = dict[str, Any]
Numbers = NDArray[np.int64]
# Rows of the traffic matrix; where there are more devices, a row is a group of neighbors.
MOST_ROWS = 64
# Shifts of an exchange among all that are drawn; of more, as many that stand for the others.
MOST_SHIFTS = 128


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that run the same stages, numbered from 0 on by `meshes`, and the step of one;
    `levels` are those of the part of the cluster that they are in.
    """

    name: str
    devices: Numbers
    meshes: tuple[Mesh, ...]
    levels: tuple[Level, ...]
    ledger: Ledger


def network_view(side: Side) -> Document:
    """Levels of the topology, groups of devices with their mesh, collectives, traffic."""
    found = list(groups(side.step))
    return {
        "devices": device_words(side.step.cluster),
        "levels": _levels(side.step, found),
        "parts": _nests(side.step),
        "groups": [_group(group) for group in found],
        "collectives": [
            {"group": group.name, **_sent(sent)}
            for group in found
            for sent in sorted(group.ledger.sent, key=lambda s: (-s.waited_ps, -s.ps, s.group))
        ],
        "traffic": _traffic(side.step, found),
    }


def groups(step: Step) -> Iterator[Group]:
    """The groups of devices of a plan, in the order of its processes."""
    names = process_names(step.decisions)
    if not isinstance(step, PipelineCase):
        mesh = step.decisions.mesh
        devices = np.asarray(mesh.devices)
        yield Group(names[0], devices, (mesh,), step.cluster.levels, step.ledger)
        return
    planned = step.decisions.stages
    for index, (own, _) in enumerate(group_lists(step.decisions)):
        programs = [Program(step.stages.pcgs[i], step.player.own(planned[i]), i) for i in own]
        alone = replace(step.timeline, processes=(step.timeline.processes[index],))
        devices = np.array(planned[own[0]].rank_devices)
        meshes = tuple(planned[i].mesh for i in own)
        levels = step.player.own(planned[own[0]]).levels
        own_ledger = pipeline_ledger(alone, [(1, programs)])
        yield Group(names[index], devices, meshes, levels, own_ledger)


def _levels(step: Step, found: Sequence[Group]) -> list[Document]:
    """Levels with what keeps the links of a device busy, on average: collectives and messages; of a
    mixed cluster those of its parts, and then those that join them.
    """
    cluster, busy = step.cluster, Counter(step.ledger.busy)
    total = sum(len(group.devices) for group in found)
    for message in step.timeline.messages:
        sender, receiver = (
            found[end].devices.tolist() for end in (message.sender, message.receiver)
        )
        join = joined(cluster, sender, receiver)
        crossed = join.cluster.levels[join.level].name
        busy[crossed] += (message.end_ps - message.start_ps) * len(sender) // total
    inner = [level for part in regular_parts(cluster) for level in part.alone.levels]
    levels = {level.name: level for level in (*(inner if cluster.parts else ()), *cluster.levels)}
    return [
        {
            "name": level.name,
            "size": level.size,
            "fabric": level.fabric,
            "bytes_per_s": level.link.bandwidth_bytes_per_s,
            "oversubscription": level.oversubscription,
            "busy_s": busy[level.name] / PS,
            "share": busy[level.name] / max(1, step.ledger.step_ps),
        }
        for level in levels.values()
    ]


def _nests(step: Step) -> list[Document]:
    """The regular parts of the cluster, with their levels from the innermost on."""
    mixed = bool(step.cluster.parts)
    return [
        {
            "device": part.cluster.device.name,
            "levels": [
                {"name": level.name, "size": level.size}
                for level in (part.alone if mixed else part.cluster).levels
                if level.size > 1
            ],
        }
        for part in regular_parts(step.cluster)
    ]


def _group(group: Group) -> Document:
    mesh, levels = group.meshes[0], group.levels
    return {
        "name": group.name,
        "devices": [int(group.devices.min()), int(group.devices.max())],
        "count": len(group.devices),
        "axes": [
            {"axis": axis.name, "size": axis.size, "levels": list(links_of(mesh, axis, levels))}
            for axis in mesh.axes
            if not axis.steps
        ],
    }


def _sent(sent: Sent) -> Document:
    return {
        "place": sent.group.place,
        "transfer": sent.group.transfer,
        "axes": sent.group.axes,
        "level": sent.group.level,
        "count": sent.count,
        "bytes": sent.num_bytes,
        "s": sent.ps / PS,
        "waited_s": sent.waited_ps / PS,
    }


def _traffic(step: Step, found: Sequence[Group]) -> Document:
    """Bytes that groups of neighboring devices send to each other in a step.

    A collective is drawn as a ring along its axes, an all_to_all as equal parts to all others.
    """
    total = max(int(group.devices.max()) for group in found) + 1
    size = _neighbors(total, [level.size for level in step.cluster.levels])
    matrix = np.zeros((-(-total // size),) * 2)
    for group in found:
        for sent in group.ledger.sent:
            mesh = _mesh_of(group, sent)
            if mesh is not None and sent.group.level not in HOST:
                is_all = "all_to_all" in sent.group.transfer
                for peers, share in _peers(mesh, sent.group.axes.split("+"), is_all):
                    flow = sent.num_bytes * share
                    np.add.at(matrix, (group.devices // size, group.devices[peers] // size), flow)
    if isinstance(step, PipelineCase):
        for source, target, flow in _messages(step):
            np.add.at(matrix, (source // size, target // size), flow)
    return {"devices_a_row": size, "bytes": np.rint(matrix).astype(np.int64).tolist()}


def _neighbors(total: int, levels: Sequence[int]) -> int:
    """How many devices share a row: whole inner levels, and as little of the next as is enough."""
    size = 1
    for level in levels:
        for part in range(1, level + 1):
            if level % part == 0 and size * part * MOST_ROWS >= total:
                return size * part
        size *= level
    return size


def _mesh_of(group: Group, sent: Sent) -> Mesh | None:
    """That of the stage whose axes a collective runs over; None for none of one."""
    axes = sent.group.axes.split("+")
    return next((mesh for mesh in group.meshes if set(axes) <= set(mesh.names)), None)


def _peers(mesh: Mesh, axes: Sequence[str], is_all: bool) -> Iterator[tuple[Numbers, float]]:
    """For each rank the rank that it sends to, and which share of its bytes."""
    count = mesh.size(tuple(axes))
    if count < 2:
        return
    step = max(1, (count - 1) // MOST_SHIFTS)
    shifts = range(1, count, step) if is_all else range(1, 2)
    for shift in shifts:
        yield _shifted(mesh, axes, shift), 1 / len(shifts)


def _shifted(mesh: Mesh, axes: Sequence[str], shift: int) -> Numbers:
    """Ranks `shift` places further on along axes, the last one fastest."""
    primes = [prime for axis in axes for prime in mesh[axis].primes]
    ranks: Numbers = np.arange(mesh.num_ranks)
    place, count = np.zeros_like(ranks), 1
    for prime in primes:
        place, count = place * prime.size + ranks // prime.stride % prime.size, count * prime.size
    moved, found = (place + shift) % count, ranks.copy()
    for prime in reversed(primes):
        digit, moved = moved % prime.size, moved // prime.size
        found += (digit - ranks // prime.stride % prime.size) * prime.stride
    return found


def _messages(step: PipelineCase) -> Iterator[tuple[Numbers, Numbers, float]]:
    """Between stages: senders, receivers, and bytes from each to each in a step."""
    stages = step.decisions.stages
    devices = [np.array(stage.rank_devices) for stage in stages]
    for transfer in step.stages.transfers:
        source, target = devices[transfer.source], devices[transfer.target]
        if source[0] == target[0]:
            continue
        forward, back = transfer_bytes(transfer, step.stages.pcgs)
        own, other = stages[transfer.source], stages[transfer.target]
        times = len(own.microbatches) or step.decisions.num_microbatches
        times //= min(own.at_once, other.at_once)
        pairs = max(len(source), len(target))
        senders, receivers = np.resize(source, pairs), np.resize(target, pairs)
        yield senders, receivers, forward[0] * times * len(source) / pairs
        if back:
            yield receivers, senders, back[0] * times * len(target) / pairs
