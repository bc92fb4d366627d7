"""A mixed cluster in words: its devices, those that a plan leaves idle, and peaks by type."""

from collections.abc import Sequence

from parloom.cost.units import format_seconds
from parloom.ir.mesh import Cluster
from parloom.ir.plan import Decisions, Plan
from parloom.ir.regular_parts import devices_of, memory_of
from parloom.report.words import device_words, memory_limit, memory_words


def left_out_words(cluster: Cluster, plans: Sequence[tuple[Decisions, float]]) -> tuple[str, ...]:
    """Which devices of a mixed cluster the fastest of `plans` (with their steps) leaves idle, and
    what it takes with them; or what it takes without some.
    """
    used = [{d for s in decisions.stages for d in devices_of(s)} for decisions, _ in plans]
    steps = [step_s for _, step_s in plans]
    best = min(range(len(plans)), key=lambda i: (steps[i], len(used[i])))
    everything = set(range(cluster.num_devices))
    step, idle = format_seconds(steps[best]), everything - used[best]
    if idle:
        others = [step_s for step_s, own in zip(steps, used, strict=True) if own & idle]
        what = f"{device_words(cluster, idle)} stay idle"
        if not others:
            return (f"{what}: no plan that was found and fits uses them",)
        return (f"{what}: with them {_longer(min(others), steps[best])}, without {step}",)
    fewer = [i for i, own in enumerate(used) if own < everything]
    if not fewer:
        return ()
    other = min(fewer, key=lambda i: steps[i])
    without = f"without {device_words(cluster, everything - used[other])}"
    longer = _longer(steps[other], steps[best])
    return (f"all devices are used: {without} {longer}, with them {step}",)


def _longer(step_s: float, best_s: float) -> str:
    return f"{format_seconds(step_s)} ({step_s / best_s - 1:+.1%})"


def peak_lines(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """The peak of a plan beside what it may be, of each type of device."""
    found = plan.prediction
    assert found is not None, "a plan with a prediction"
    if not cluster.parts:
        there = cluster.device.memory_bytes
        return (memory_words(found.peak_bytes, memory_limit(plan, there), there),)
    lines = []
    for device, peak in found.peaks:
        there = memory_of(cluster, device)
        words = memory_words(peak, memory_limit(plan, there), there)
        lines.append(f"{device}: {words.replace(' per device', '')}")
    return tuple(lines)


def fullest_bytes(plan: Plan, cluster: Cluster) -> int:
    """What the device may hold that holds most."""
    found = plan.prediction
    if not cluster.parts or found is None or not found.peaks:
        return memory_limit(plan, cluster.device.memory_bytes)
    device, _ = max(found.peaks, key=lambda entry: entry[1])
    return memory_limit(plan, memory_of(cluster, device))
