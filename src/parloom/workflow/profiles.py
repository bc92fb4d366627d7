"""Profile files: what variants take on one type of worker, measured or as someone else has it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parloom.cost import units
from parloom.cost.strict_yaml import Section, read
from parloom.errors import InputError
from parloom.input_files import MIB, read_input


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of one request by (operator, variant), on workers of one type."""

    worker: str
    latency_s: Mapping[tuple[str, str], float]
    machine: str = ""
    spread: Mapping[tuple[str, str], float] = field(default_factory=dict)


def read_profile(path: Path) -> Profile:
    """The profile of a file; raises `InputError` with file:line:column."""
    data = read_input(path, "the profile", MIB)
    try:
        root = read(data.decode("utf-8"), str(path))
    except UnicodeDecodeError:
        raise InputError(f"cannot read the profile {path}: it is not UTF-8 text") from None
    root.check(("worker", "latency"), ("machine",))
    operators = root.section("latency")
    found = {}
    for operator in operators.named():
        variants = operators.section(operator)
        for variant in variants.named():
            found[operator, variant] = _latency(variants, variant)
    return Profile(root.text("worker"), found, root.text_or("machine", ""))


def _latency(variants: Section, name: str) -> float:
    if not variants.is_mapping(name):
        return variants.parse(name, units.parse_service_s)
    own = variants.section(name)
    own.check(("time",), ("spread",))
    own.text_or("spread", "")
    return own.parse("time", units.parse_service_s)


def profile_text(profile: Profile) -> str:
    """The file that `read_profile` reads back."""
    lines = ["# Written by `parloom workflow profile`: medians of one request, and their spread."]
    lines += [f"worker: {json.dumps(profile.worker)}"]
    lines += [f"machine: {json.dumps(profile.machine)}"] if profile.machine else []
    lines.append("latency:")
    last = None
    for (operator, variant), seconds in profile.latency_s.items():
        if operator != last:
            lines.append(f"  {json.dumps(operator)}:")
            last = operator
        spread = profile.spread.get((operator, variant), 0.0)
        entry = f"{{time: {seconds * 1e3:.6g}ms, spread: {100 * spread:.1f}%}}"
        lines.append(f"    {json.dumps(variant)}: {entry}")
    return "\n".join(lines) + "\n"
