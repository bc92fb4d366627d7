"""A plan's decisions in words that need no knowledge of rules and factors."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from math import prod
from operator import mul
from pathlib import Path
from types import MappingProxyType

from parloom.action_text import stages_text
from parloom.cost.kernels import PRODUCTS, SPEC
from parloom.cost.measured import Source
from parloom.cost.units import format_bytes, format_rate, format_seconds, parse_bytes
from parloom.errors import shell_word
from parloom.ir.expected import Aim, Constraint, Prediction
from parloom.ir.factors import factorize
from parloom.ir.graph import Call, Graph, Node
from parloom.ir.lower_stages import group_lists
from parloom.ir.mesh import Cluster, Device, Level, Mesh, MeshAxis
from parloom.ir.ops.experts import NAME as EXPERTS
from parloom.ir.plan import MEMORY, Decisions, ModelSource, ParameterDecision, Plan, Stage, Storage
from parloom.ir.plan_json import numbers_text, ranks_text
from parloom.ir.regular_parts import devices_of, part_with, regular_parts
from parloom.ir.samples import num_samples, num_tokens
from parloom.ir.stages import StageDecisions, cut_plan
from parloom.report.naming import (
    ATTENTION,
    ENTRIES,
    INPUTS,
    OUTPUTS,
    names_of,
    ways_of,
)
from parloom.rewrite.rewrites import before_takes, rewritten, takes_of
from parloom.rewrite.terms import calls_in

WARNING = "warning: "
CPU = "cpu"
BYTES = re.compile("[0-9]{1,18}")
MOST = 6
MOST_WAYS = 3
# Shares of a device's memory: a peak that leaves too little for what is not counted, and a limit
# with which plans leave room for it.
TIGHT, ROOMY = 0.97, 0.95
Axes = tuple[str, ...]
# After the name of the method whose search was stopped.
Stored = tuple[tuple[str, ...], Axes, str]
INTERRUPTED = "interrupted; this is the best of what was found until then"


def words(graph: Graph, decisions: Decisions, cluster: Cluster | None = None) -> tuple[str, ...]:
    """Per mesh axis what it splits, over which links where `cluster` is given, and how parameters
    are stored; `graph` as captured.
    """
    rewrites = tuple(rewrite_words(graph, decisions))
    graph = rewritten(graph, decisions.rewrites)
    if len(decisions.stages) > 1:
        return (*_stage_words(graph, decisions, cluster), *rewrites)
    levels = _levels(decisions.stages[0], cluster)
    ways = ways_of(graph, decisions)
    alone = decisions.num_ranks == 1 and not any(ways.values())
    lines = [
        _axis_words(axis, ways[axis.name], links_of(decisions.mesh, axis, levels))
        for axis in decisions.mesh.axes
        if axis.steps or not alone
    ]
    lines += ["one device computes all of it"] * alone
    trains = any(entry.trainable for entry in graph.of_kind("parameter"))
    stored = Counter(own for found in decisions.parameters for own in _stored(found, trains))
    for (roles, axes, memory), count in stored.most_common(MOST):
        over = f"in parts over {', '.join(axes)}" if axes else "whole"
        where = " in host memory" if memory == "host" else ""
        what = " and ".join(filter(None, (", ".join(roles[:-1]), roles[-1])))
        lines.append(f"{what} of {_count(count, 'parameter')} stored {over}{where}")
    if len(stored) > MOST:
        lines.append(f"and {_count(len(stored) - MOST, 'more way')} to store parameters")
    if not stored and decisions.num_ranks > 1:
        features = any(w.keys() & {OUTPUTS, INPUTS, ENTRIES} for w in ways.values())
        kept = "its part of the split weights and all others" if features else "all weights"
        beside = ", with their gradients and optimizer state" if trains else ""
        lines.append(f"every device stores {kept}{beside}")
    blocks = sum(isinstance(item, Call) for item in graph.main.body)
    policies = Counter(
        f"{a.policy} {'some values' if a.lists else 'activations'}"
        for a in decisions.activations
        if a.policy != "keep"
    )
    lines += [
        f"{policy} of {count} of {_count(blocks, 'block')}" for policy, count in policies.items()
    ]
    if decisions.accumulates:
        lines.append(
            f"the loss is the mean of those of {decisions.num_microbatches} microbatches, each"
            " computed by itself"
        )
    for dtype in decisions.sent_dtypes:
        gradients = sum(p.gradient_sent == dtype for p in decisions.parameters)
        weights = sum(p.weight_sent == dtype for p in decisions.parameters)
        named = [_count(gradients, "gradient")] * (gradients > 0)
        named += [_count(weights, "gathered weight")] * (weights > 0)
        lines.append(f"{' and '.join(named)} travel in {dtype}")
    return (*lines, *rewrites)


def run_words(plan: Plan, cluster: Cluster, path: str, given: str) -> str:
    """The command that runs a plan with a script; where devices run none, the one that says which
    device each rank is, and of a pipeline, the one that shows it.
    """
    if cluster.backend != "other":
        return f"parloom run {path} -- {given}"
    target = "jax" if len(plan.decisions.stages) == 1 else "model-explorer"
    return f"parloom export {path} --to {target}"


def rewrite_words(graph: Graph, decisions: Decisions) -> Iterator[str]:
    """What is computed in another way, where, and by which rules."""
    takes = takes_of(decisions.rewrites)
    graph = before_takes(graph, decisions.rewrites) if takes else graph
    calls = [item for item in graph.main.body if isinstance(item, Call)]
    for take in takes:
        function = graph.by_name.get(take.function, graph.main)
        paths = {v.name: i.path for i in function.body if isinstance(i, Node) for v in i.results}
        what = ", ".join(paths.get(name) or name for _, name in take.taken)
        blocks = [call.prefix for call in calls if call.function == take.function]
        where = f" in {blocks[0]}" if blocks else ""
        if len(blocks) > 1:
            where += f" and in {_count(len(blocks) - 1, 'more block')}"
        names = dict.fromkeys(call.op for call in calls_in(take.call))
        yield f"{what}{where}: computed by {', '.join(names)} ({', '.join(take.rules)})"


def _levels(stage: Stage, cluster: Cluster | None) -> tuple[Level, ...]:
    """Those that the devices of a stage are in."""
    return part_with(cluster, devices_of(stage)).cluster.levels if cluster else ()


def _stage_words(graph: Graph, decisions: Decisions, cluster: Cluster | None) -> Iterator[str]:
    """Which items each stage has, on which devices, and what they split there."""
    count = len(decisions.stages)
    yield f"{count} stages, schedule {decisions.schedule}"
    parts = cut_plan(graph, decisions)
    chosen = StageDecisions(decisions, parts)
    ways: list[tuple[int, int, str]] = []
    names = names_of(graph)
    for index, (own, stage) in enumerate(zip(parts.graphs, decisions.stages, strict=True)):
        split, levels = ways_of(own, chosen.of(index), names), _levels(stage, cluster)
        axes = "; ".join(
            _axis_words(axis, split[axis.name], links_of(stage.mesh, axis, levels))
            for axis in stage.mesh.axes
            if axis.size > 1
        )
        own_part = f", microbatches {numbers_text(stage.microbatches)}" * bool(stage.microbatches)
        own_part += f", {stage.at_once} microbatches at once" * (stage.at_once > 1)
        ways.append((len(stage.items), stage.mesh.num_ranks, f"{axes and ': '}{axes}{own_part}"))
    for (*_, split_words), alike in groupby(range(count), ways.__getitem__):
        yield _alike_words(decisions, list(alike), split_words)


def _alike_words(decisions: Decisions, alike: Sequence[int], split: str) -> str:
    """Stages one after the other that have as many items, and split the same; one alone, too."""
    stages = [decisions.stages[index] for index in alike]
    items = " to ".join(dict.fromkeys((stages[0].items[0], stages[-1].items[-1])))
    groups = {stage.devices for stage in stages}
    numbers = sorted({rank for devices in groups for own in devices for rank in own})
    named = f"device{'s' * (len(numbers) > 1)} {numbers_text(numbers)}"
    if len(alike) == 1:
        return f"stage {alike[0]}: {items} ({named}{split})"
    each = f"{_count(len(stages[0].items), 'item')} each"
    size = _count(stages[0].mesh.num_ranks, "device")
    shared = (
        f", {size} each{_turns([stage.devices for stage in stages])}" if len(groups) > 1 else ""
    )
    return f"stages {alike[0]} to {alike[-1]}: {items}, {each} ({named}{shared}{split})"


def _turns(groups: Sequence[object]) -> str:
    """In which order groups of devices take stages, where one takes several."""
    count = len(set(groups))
    if len(groups) == count:
        return ""
    if all(own == groups[index % count] for index, own in enumerate(groups)):
        return ", by turns"
    return ", there and back" if list(groups) == list(groups)[::-1] else ", in changing order"


def process_names(decisions: Decisions) -> list[str]:
    """What stands for all devices that have the same stages, one name for each such group."""
    ranks = decisions.num_ranks
    if len(decisions.stages) == 1:
        return [f"each of {ranks} devices" if ranks > 1 else "the device"]
    names = []
    for stages, _ in group_lists(decisions):
        devices = ranks_text(decisions.stages[stages[0]].devices)
        names.append(f"{stages_text(stages)} on {devices}")
    return names


def _stored(decision: ParameterDecision, trains: bool) -> Iterator[Stored]:
    """What of a parameter is stored otherwise than it is computed with: roles that are stored
    alike, axes, memory. Where nothing `trains` weights alone are there.
    """
    roles = {"weights": decision.weight}
    if trains:
        roles |= {"gradients": decision.gradient, "optimizer state": decision.optimizer}
    for storage in dict.fromkeys(found for found in roles.values() if found != Storage()):
        alike = tuple(role for role, found in roles.items() if found == storage)
        yield alike, storage.axes, storage.memory


def rate_words(graph: Graph, device: Device) -> tuple[str, ...]:
    """At which rate products are priced whose dtype a device lists none for."""
    rates = dict(device.flops_per_s)
    lowest = min(rates, key=lambda dtype: rates[dtype])
    found = {
        value.spec.dtype
        for flat in graph.flat()
        if flat.node.op in (*PRODUCTS, ATTENTION)
        for value in flat.node.results
        if value.spec.is_float and value.spec.dtype not in rates
    }
    at = f"at {format_rate(rates[lowest], 'FLOP/s')}, its rate for {lowest}, the lowest it lists"
    return tuple(
        f"{device.name} lists no rate for {dtype}: priced {at}{_half(dtype, rates)}"
        for dtype in sorted(found)
    )


def _half(dtype: str, rates: Mapping[str, float]) -> str:
    """The other half precision, where a device has that one only."""
    if dtype != "bfloat16" or "float16" not in rates:
        return ""
    return f"; --dtype fp16 computes at {format_rate(rates['float16'], 'FLOP/s')}"


def unasked_words(source: ModelSource, graph: Graph, samples: int) -> tuple[str, ...]:
    """What a model was built with because nothing else was asked for, with the flag that asks."""
    lines = []
    if source.dtype is None:
        dtypes = {e.value.spec.dtype for e in graph.of_kind("parameter")}
        lines.append(f"parameters in {', '.join(sorted(dtypes))} (--dtype)")
    if source.is_factory:
        return tuple(lines)
    if source.batch is None:
        lines.append(f"a batch of {samples} (--batch)")
    factored = factorize(graph)
    tokens = num_tokens(factored)
    if source.seq is None and tokens is not None:
        lines.append(f"samples of {tokens // num_samples(factored)} tokens (--seq)")
    return tuple(lines)


def routing_words(graph: Graph) -> tuple[str, ...]:
    """What is assumed of routers."""
    if not any(node.op == EXPERTS for _, node in graph.unfolded()):
        return ()
    return ("routers choose all experts equally often; others make the busiest rank slower",)


def checkpoint_words(graph: Graph) -> tuple[str, ...]:
    """What becomes of the checkpoints that the model itself asks for."""
    blocks = graph.recomputed_calls
    lines = []
    if blocks:
        lines.append(f"{_count(len(blocks), 'block')} recomputed, as the model's checkpoints ask")
    kept = [path for path in graph.recompute if path not in blocks]
    if kept:
        some = ", ".join(kept[:3]) + (", ..." if len(kept) > 3 else "")
        lines.append(
            "kept in memory although the model checkpoints it, because it is only a part of a"
            f" block or of a module: {some}; checkpoint whole blocks to have it recomputed"
        )
    return tuple(lines)


def idle_axes(decisions: Decisions) -> tuple[MeshAxis, ...]:
    """The axes of more than one device that split no operator: their devices do the same work."""
    used = {a for node in decisions.nodes for _, axes in node.factors for a in axes}
    return tuple(
        axis
        for axis in dict.fromkeys(axis for stage in decisions.stages for axis in stage.mesh.axes)
        if axis.size > 1 and not axis.steps and axis.name not in used
    )


def splits(decisions: Decisions) -> bool:
    """Whether devices share the work at all."""
    idle, ranks = idle_axes(decisions), decisions.num_ranks
    if len(decisions.stages) > 1:
        return True
    return ranks == 1 or prod(axis.size for axis in idle) < ranks


def idle_words(decisions: Decisions, why: str = "") -> tuple[str, ...]:
    """A warning where devices do the same work as others; `why` they all do."""
    idle, ranks = idle_axes(decisions), decisions.num_ranks
    if not splits(decisions):
        what = f"nothing is split: all {ranks} devices do all the work, no faster than one"
        return (f"{WARNING}{what}{why and '; '}{why}",)
    return tuple(
        f"{WARNING}axis {axis.name} splits no operator: its {axis.size} devices do the same work"
        for axis in idle
    )


def uneven_words(samples: int, devices: int) -> tuple[str, ...]:
    """Where samples that would be enough for all devices do not divide over them."""
    if samples < devices or samples % devices == 0:
        return ()
    below = samples // devices * devices
    near = f"a batch of {below} or {below + devices} would"
    return (f"{samples} samples do not divide over {devices} devices; {near}",)


def tight_words(cluster: Cluster, peak_bytes: int) -> tuple[str, ...]:
    """Where a peak leaves a device no room for what it does not count."""
    there = cluster.device.memory_bytes
    if cluster.parts or cluster.device.name == CPU or peak_bytes <= TIGHT * there:
        return ()
    room = f"{format_bytes(max(0, there - peak_bytes))} ({max(0.0, 1 - peak_bytes / there):.1%})"
    return (
        f"the peak leaves {room} of a device: contexts of the driver, buffers of NCCL and"
        f" fragmentation are not counted; --memory {int(ROOMY * there) // 2**20}MiB leaves room",
    )


def part_words(
    cluster: Cluster, decisions: Decisions, step_s: float, fewest: int, their_step_s: float
) -> tuple[str, ...]:
    """Which devices of `cluster` a plan leaves idle, and what a plan on the `fewest` devices saves
    whose step is as long, but for a percent.
    """
    used, there, lines = decisions.num_ranks, cluster.num_devices, []
    if used < there:
        lines.append(
            f"{_part(cluster, used)} will do{_share(cluster, used, there)}: {there - used} of"
            f" {there} devices stay idle, and no plan that was found on more is faster"
        )
    if fewest < used:
        longer, saved = their_step_s / step_s - 1, _share(cluster, fewest, used)
        part = _part(cluster, fewest)
        lines.append(f"the same step on {part} ({longer:+.1%}){saved}: --devices {fewest}")
    return tuple(lines)


def _part(cluster: Cluster, num_devices: int) -> str:
    """The first devices in words: those of a node where links have two levels."""
    inner = cluster.levels[0].size
    if len(cluster.levels) != 2 or num_devices < inner or inner == 1:
        return "one device" if num_devices == 1 else f"{num_devices} devices"
    return "one node" if num_devices == inner else f"{num_devices // inner} nodes"


def _share(cluster: Cluster, some: int, others: int) -> str:
    """What some devices cost against others; processes of one machine cost nothing."""
    if cluster.device.name == CPU and len(cluster.levels) == 1:
        return ""
    share = "half the price" if 2 * some == others else f"{some / others:.3g} of the price"
    price = cluster.price_per_hour
    if price == 0:
        return ""
    if price is None:
        return f", {share}"
    each = price / cluster.num_devices
    return f", {share} (${some * each:.2f} an hour, not ${others * each:.2f})"


def links_of(mesh: Mesh, axis: MeshAxis, levels: Sequence[Level]) -> tuple[str, ...]:
    """The levels that an axis of a mesh is on, by name, the slowest first: in an order of devices,
    those in which two devices of a group along it differ.
    """
    if not levels:
        return ()
    crossed = {p.level for p in axis.primes if p.size > 1}
    if mesh.order and not axis.steps:
        crossed = set()
        strides = tuple(accumulate((level.size for level in levels[:-1]), mul, initial=1))
        for rank, device in enumerate(mesh.order):
            first = mesh.order[
                rank - sum(rank // p.stride % p.size * p.stride for p in axis.primes)
            ]
            crossed |= {
                at
                for at, (level, stride) in enumerate(zip(levels, strides, strict=True))
                if device // stride % level.size != first // stride % level.size
            }
    return tuple(levels[at].name for at in sorted(crossed, reverse=True))


def _axis_words(axis: MeshAxis, ways: Counter[str], links: Sequence[str]) -> str:
    if axis.steps:
        return f"{axis.name} = {axis.size} microbatches one after the other"
    joined = f" ({', '.join(links)})" if links else ""
    over = f"axis {axis.name} over {_count(axis.size, 'device')}{joined} splits"
    if not ways:
        same = ": they all do the same work" if axis.size > 1 else ""
        return f"{over} no operator{same}"
    parts = [f"{what} in {_count(n, 'operator')}" for what, n in ways.most_common(MOST_WAYS)]
    rest = sum(n for _, n in ways.most_common()[MOST_WAYS:])
    if rest:
        parts.append(f"other dims in {_count(rest, 'operator')}")
    return f"{over} {', '.join(parts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


SOURCES = MappingProxyType(
    {
        "spec": "from data sheets, not calibrated: compare plans with it, not clocks",
        "calibrated": "from measured rates",
        "measured": "from measured operators",
    }
)


def constraint_line(constraint: Constraint, found: Prediction, aim: Aim | None = None) -> str:
    """What a constraint costs a plan of which `found` is expected, in words; the best plan without
    it may be slower, where `aim` is another one than time.
    """
    step_s, peak = found.step_s, found.peak_bytes
    if constraint.step_s is None or constraint.peak_bytes is None:
        return f"{constraint.text}: what it costs was not looked for"
    without = format_seconds(constraint.step_s), format_bytes(constraint.peak_bytes)
    instead = f"; {constraint.instead}" if constraint.instead else ""
    costs = f"{constraint.text} cost{'s' if constraint.text.startswith('--') else ''}"
    if aim is not None and (constraint.step_s, constraint.peak_bytes) != (step_s, peak):
        with_it = f"{format_seconds(step_s)} and {format_bytes(peak)}"
        return f"{constraint.text}: {with_it} with it, {' and '.join(without)} without{instead}"
    if constraint.step_s == step_s:
        return f"{costs} nothing{instead}"
    return (
        f"{costs} {format_seconds(step_s - constraint.step_s)}"
        f" ({step_s / constraint.step_s - 1:+.1%}): {format_seconds(step_s)} and"
        f" {format_bytes(peak)} with it, {' and '.join(without)} without{instead}"
    )


def title_words(plan: Plan, cluster: Cluster) -> str:
    """What is planned, on which devices, and by which method."""
    devices = device_words(cluster)
    return f"{plan.source.name} on {cluster.name} ({devices}): {plan.method}"


def device_words(cluster: Cluster, devices: Iterable[int] | None = None) -> str:
    """How many devices of each type there are, among `devices` where given: `8 x A + 4 x B`."""
    among = set(range(cluster.num_devices) if devices is None else devices)
    found: dict[str, int] = {}
    for part in regular_parts(cluster):
        name = part.cluster.device.name
        found[name] = found.get(name, 0) + len(among.intersection(part.devices))
    return " + ".join(f"{count} x {name}" for name, count in found.items() if count)


def uncalibrated_words(plan: Plan, source: Source) -> str:
    """A warning where `plan` was predicted with a calibration and `source` is without one."""
    found = plan.prediction
    if found is None or found.source == SPEC or source.name != SPEC:
        return ""
    said = f"{format_seconds(found.step_s)} ({found.source})"
    return (
        f"{WARNING}the plan of {plan.method} was predicted to take {said}, and the times here are"
        " those of data sheets: give --calibration F, as to `plan`"
    )


def constraint_lines(plan: Plan) -> tuple[str, ...]:
    """What the constraints of a plan cost it, in words."""
    found, aim = plan.counted, plan.aim
    if found is None:
        return ()
    if plan.inference is not None:  # both of its objectives are times
        aim = None
    return tuple(constraint_line(constraint, found, aim) for constraint in plan.constraints)


def memory_limit(plan: Plan, device_bytes: int) -> int:
    """Bytes of a device that `plan` may use: those of the device, or fewer if --memory said so."""
    given = [c.text.partition(" ")[2] for c in plan.constraints if c.text.startswith(MEMORY)]
    return min(
        [
            device_bytes,
            *(int(g) if BYTES.fullmatch(g) else parse_bytes(g, down=True) for g in given),
        ]
    )


def memory_words(num_bytes: int, limit: int, device_bytes: int) -> str:
    """A peak beside what it may be."""
    of, share = f"{format_bytes(num_bytes)} of {format_bytes(limit)}", f"{num_bytes / limit:.1%}"
    if limit == device_bytes:
        return f"{of} per device ({share})"
    return f"{of} allowed ({share}; --memory: the device has {format_bytes(device_bytes)})"


def explained_words(path: str | Path, calibration: str | Path | None) -> str:
    """A plan as the next `parloom explain` is asked for it: with the same measured rates."""
    word = shell_word(path)
    return f"{word} --calibration {shell_word(calibration)}" if calibration else word


def source_words(source: str, error: float, step_s: float) -> str:
    """Where a predicted time comes from, and between which times the step is likely to be."""
    if not error:
        return SOURCES[source]
    least, most = (format_seconds(step_s * math.exp(sign * error)) for sign in (-1, 1))
    return f"{SOURCES[source]}; likely {least} .. {most}"
