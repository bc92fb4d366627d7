"""Workflow files: YAML to a workflow, every fault with its line and column.

The format: `docs/reference/workflows.md`. A file of the numbers of a published instance, whose
units are fixed, is read by `published`.
"""

from collections.abc import Mapping
from pathlib import Path

from parloom.cost import units
from parloom.cost.strict_yaml import Section, read
from parloom.errors import InputError, nearest
from parloom.input_files import MIB, read_input
from parloom.workflow.checks import (
    check_graph,
    check_workers,
    edge_of,
    known,
    latencies_of,
    source_names,
)
from parloom.workflow.model import (
    Accuracy,
    Edge,
    Link,
    Operator,
    Positions,
    Rule,
    Sample,
    Source,
    Traffic,
    Variant,
    Worker,
    Workflow,
)
from parloom.workflow.profiles import read_profile
from parloom.workflow.published import is_published, read_published

MOST_BYTES = MIB
Latencies = Mapping[tuple[str, str], Mapping[str, float]]
"""By operator and variant: seconds by worker."""


def load(path: str | Path) -> Workflow:
    """The workflow of a file; raises `InputError` with file:line:column."""
    return read_workflow(_text(path), str(path))


def _text(path: str | Path) -> str:
    data = read_input(Path(path), "the workflow", MOST_BYTES)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"cannot read the workflow {path}: it is not UTF-8 text") from None


def models(path: str | Path, worker: str) -> dict[tuple[str, str], str]:
    """The PyTorch models that a file names, by operator and variant.

    Python files are looked for beside the file. It may lack latencies on the worker, and may list
    a profile that is still to be written; all else has to be as for a plan. Raises `InputError`
    where it names no models.
    """
    root = read(_text(path), str(path))
    if is_published(root):
        raise root.error(root.node, "numbers as published name no models that could be timed")
    section = root.section("operators")
    found = {}
    for operator in section.named():
        variants = section.section(operator).section("variants")
        for variant in variants.named():
            own = variants.section(variant)
            if own.has("model"):
                found[operator, variant] = _beside(path, own.text("model"))
    if not found:
        raise section.error(section.node, "no variant has a `model`, as zoo:resnet, to be timed")
    own = root.section("workers")
    if worker not in own.named():
        hint = nearest(worker, own.names())
        raise own.error(own.node, f"--worker: unknown worker {worker!r}{hint}")
    _described(root, {key: {worker: 1.0} for key in found})
    return found


def _beside(path: str | Path, spec: str) -> str:
    """A model by its Python file, `net.py:make`, from the working directory; others as named."""
    file, colon, factory = spec.rpartition(":")
    return f"{Path(path).parent / file}:{factory}" if colon and file.endswith(".py") else spec


def read_workflow(text: str, where: str) -> Workflow:
    """The workflow that YAML describes; profiles are looked for beside the file `where`."""
    root = read(text, where)
    return read_published(root) if is_published(root) else _described(root)


def _described(root: Section, to_come: Latencies | None = None) -> Workflow:
    """The workflow of a file; latencies that are `to_come` may be in a profile that is missing."""
    root.check(
        ("sources", "operators", "messages", "workers"),
        ("name", "tiers", "traffic", "links", "accuracy", "latency_bound", "profiles"),
    )
    tiers = _tiers(root)
    workers = _workers(root.section("workers"), tiers)
    measured = _profiles(root, {worker.name for worker in workers}, to_come)
    rule = _rule(root)
    operators = _operators(root.section("operators"), workers, measured, rule)
    sources = _sources(root.section("sources"), tiers, operators)
    edges = tuple(_edge(section, sources, operators) for section in root.sections("messages"))
    check_graph(root, "messages", sources, operators, edges)
    check_workers(root, tiers, workers, operators)
    accuracy, floor = _accuracy(root, rule, operators, edges)
    bounded = root.has("latency_bound")
    rates = root.section("sources")
    return Workflow(
        root.text_or("name", Path(root.where).stem),
        tiers,
        sources,
        operators,
        edges,
        workers,
        _links(root, tiers),
        accuracy,
        root.parse("latency_bound", units.parse_service_s) if bounded else None,
        _traffic(root) is Traffic.TWO_WAY,
        Positions(
            floor,
            rates.at(rates.key(rates.names()[0])),
            root.at(root.get("latency_bound")) if bounded else "",
        ),
    )


def _tiers(root: Section) -> tuple[str, ...]:
    if not root.has("tiers"):
        return ("edge", "cloud")
    tiers = root.texts("tiers")
    for position, tier in enumerate(tiers):
        if tier in tiers[:position]:
            raise root.error(root.get("tiers"), f"tiers: the name {tier!r} is given twice")
    return tiers


def _traffic(root: Section) -> Traffic:
    if not root.has("traffic"):
        return Traffic.ONE_WAY
    return Traffic(known(root, "traffic", "traffic", [way.value for way in Traffic]))


def _tier(section: Section, key: str, tiers: tuple[str, ...]) -> int:
    return tiers.index(known(section, key, "tier", tiers))


def _workers(section: Section, tiers: tuple[str, ...]) -> tuple[Worker, ...]:
    workers = []
    for name in section.named():
        own = section.section(name)
        own.check(("tier", "price"), ("count",))
        price = own.parse("price", units.parse_usd_per_h)
        count = own.integer("count") if own.has("count") else 1
        workers.append(Worker(name, _tier(own, "tier", tiers), price, count))
    return tuple(workers)


def _profiles(root: Section, workers: set[str], to_come: Latencies | None) -> Latencies:
    """What profile files measured, by operator and variant; later files come first."""
    found = {key: dict(own) for key, own in (to_come or {}).items()}
    for name in root.texts("profiles"):
        path = Path(root.where).parent / name
        if to_come is not None and not path.exists():
            continue
        try:
            profile = read_profile(path)
        except InputError as error:
            make = f"; make it: parloom workflow profile {root.where} --worker NAME --out {path}"
            hint = "" if path.exists() else make
            raise root.error(root.get("profiles"), f"profiles: {error}{hint}") from None
        if profile.worker not in workers:
            hint = nearest(profile.worker, workers)
            message = f"profiles: {path} is of the worker {profile.worker!r}, which is none{hint}"
            raise root.error(root.get("profiles"), message)
        for key, seconds in profile.latency_s.items():
            found.setdefault(key, {})[profile.worker] = seconds
    return found


def _sources(
    section: Section, tiers: tuple[str, ...], operators: tuple[Operator, ...]
) -> tuple[Source, ...]:
    sources = []
    for name in source_names(section, operators):
        own = section.section(name)
        own.check(("rate",), ("tier",))
        tier = _tier(own, "tier", tiers) if own.has("tier") else 0
        sources.append(Source(name, own.parse("rate", units.parse_requests), tier))
    return tuple(sources)


def _operators(
    section: Section, workers: tuple[Worker, ...], measured: Latencies, rule: Rule
) -> tuple[Operator, ...]:
    operators = []
    names = section.named()
    for name in names:
        own = section.section(name)
        own.check(("variants",))
        variants = own.section("variants")
        several = []
        for variant in variants.named():
            described = variants.section(variant)
            described.check((), ("latency", "accuracy", "model"))
            latencies = dict(measured.get((name, variant), {}))
            if described.has("latency"):
                own_latencies = described.section("latency")
                latencies |= latencies_of(own_latencies, workers, units.parse_service_s)
            if not latencies:
                message = f"variant {variant!r} of {name!r} has no latency on any worker"
                raise variants.error(variants.key(variant), message)
            accuracy, samples = _own_accuracy(described, rule, names)
            several.append(Variant(variant, latencies, accuracy, samples))
        if rule is Rule.PRODUCT:
            _check_all_say(name, variants)
        operators.append(Operator(name, tuple(several)))
    listed = {
        (operator.name, variant.name) for operator in operators for variant in operator.variants
    }
    for one in measured:
        if one not in listed:
            known_names = sorted("/".join(key) for key in listed)
            hint = nearest("/".join(one), known_names)
            raise section.error(
                section.node, f"a profile names {'/'.join(one)!r}, which is none{hint}"
            )
    return tuple(operators)


def _check_all_say(operator: str, variants: Section) -> None:
    """Raise `InputError` where some variants of an operator say their accuracy, and others none."""
    silent = [name for name in variants.named() if not variants.section(name).has("accuracy")]
    if silent and len(silent) < len(variants.named()):
        message = f"variant {silent[0]!r} of {operator!r} needs an accuracy, as its others have one"
        raise variants.error(variants.key(silent[0]), message)


def _own_accuracy(
    section: Section, rule: Rule, operators: tuple[str, ...]
) -> tuple[float, tuple[Sample, ...]]:
    if not section.has("accuracy"):
        return 1.0, ()
    if rule not in (Rule.PRODUCT, Rule.PROFILES):
        message = "accuracy: nothing reads it; say `rule: product` or `rule: profiles`"
        raise section.error(section.key("accuracy"), f"{message} under the file's `accuracy`")
    if not section.is_list("accuracy"):
        own = section.parse("accuracy", units.parse_percent)
        return own, (Sample({}, own),)
    if rule is not Rule.PROFILES:
        message = "accuracy: samples are for `rule: profiles`; a product takes one number"
        raise section.error(section.get("accuracy"), message)
    samples = []
    for sample in section.sections("accuracy"):
        sample.check(("inputs", "output"))
        inputs = sample.section("inputs")
        needed = {}
        for name in inputs.named():
            if name not in operators:
                raise inputs.error(
                    inputs.key(name), f"unknown operator {name!r}{nearest(name, operators)}"
                )
            needed[name] = inputs.parse(name, units.parse_percent)
        samples.append(Sample(needed, sample.parse("output", units.parse_percent)))
    return 1.0, tuple(samples)


def _edge(section: Section, sources: tuple[Source, ...], operators: tuple[Operator, ...]) -> Edge:
    section.check(("from", "to", "size"), ("ratio",))
    ratio = section.parse_or("ratio", _ratio, 1.0)
    return edge_of(section, "size", sources, operators, units.parse_mean_bytes, ratio)


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 1e-6 <= ratio <= 1e6:
        expected = "expected a number above 0, from 1e-6 to 1e6, such as 3 or 0.25"
        raise InputError(f"{expected}, got {text!r}")
    return ratio


def _links(root: Section, tiers: tuple[str, ...]) -> dict[tuple[int, int], Link]:
    links: dict[tuple[int, int], Link] = {}
    for section in root.sections("links") if root.has("links") else ():
        section.check(("from", "to"), ("price", "bandwidth", "latency"))
        pair = _tier(section, "from", tiers), _tier(section, "to", tiers)
        if pair in links:
            ends = f"from {tiers[pair[0]]!r} to {tiers[pair[1]]!r}"
            raise section.error(section.node, f"the link {ends} is given twice")
        links[pair] = Link(
            section.parse_or("price", units.parse_usd_per_byte, 0.0),
            section.parse_or("bandwidth", units.parse_bandwidth, float("inf")),
            section.parse_or("latency", units.parse_seconds, 0.0),
        )
    return links


def _rule(root: Section) -> Rule:
    if not root.has("accuracy"):
        return Rule.NONE
    section = root.section("accuracy")
    section.check(("rule", "floor"), ("table",))
    rules = [rule.value for rule in Rule if rule is not Rule.NONE]
    rule = Rule(known(section, "rule", "rule", rules))
    if (rule is Rule.TABLE) != section.has("table"):
        raise section.error(section.node, "a table goes with `rule: table`, and that with a table")
    return rule


def _accuracy(
    root: Section, rule: Rule, operators: tuple[Operator, ...], edges: tuple[Edge, ...]
) -> tuple[Accuracy, str]:
    """The accuracy that is asked for, and where the file says its floor."""
    if rule is Rule.NONE:
        return Accuracy(), ""
    section = root.section("accuracy")
    floor = section.parse("floor", units.parse_percent)
    at = section.at(section.get("floor"))
    if rule is Rule.PROFILES:
        _check_samples(root, operators, edges)
    if rule is not Rule.TABLE:
        return Accuracy(rule, floor), at
    names, table = _table(section, operators)
    return Accuracy(rule, floor, names, table), at


def _table(
    section: Section, operators: tuple[Operator, ...]
) -> tuple[tuple[str, ...], dict[tuple[str, ...], float]]:
    by_name = {operator.name: operator for operator in operators}
    table: dict[tuple[str, ...], float] = {}
    names: tuple[str, ...] = ()
    for row in section.sections("table"):
        if not names:
            names = tuple(name for name in row.named() if name != "accuracy")
            for name in names:
                if name not in by_name:
                    hint = nearest(name, by_name)
                    raise row.error(row.key(name), f"unknown operator {name!r}{hint}")
        row.check((*names, "accuracy"))
        several = ([v.name for v in by_name[name].variants] for name in names)
        key = tuple(known(row, n, "variant", v) for n, v in zip(names, several, strict=True))
        if key in table:
            raise row.error(row.node, f"the row of {', '.join(key)} is given twice")
        table[key] = row.parse("accuracy", units.parse_percent)
    return names, table


def _check_samples(root: Section, operators: tuple[Operator, ...], edges: tuple[Edge, ...]) -> None:
    """Raise `InputError` where samples do not name just the operators that send messages."""
    names = {operator.name for operator in operators}
    section = root.section("operators")
    for operator in operators:
        needed = {e.producer for e in edges if e.consumer == operator.name} & names
        variants = section.section(operator.name).section("variants")
        for variant in operator.variants:
            wrong = any(set(sample.inputs) != needed for sample in variant.samples)
            if variant.samples and not wrong:
                continue
            listed = ", ".join(sorted(needed))
            how = f"a list of samples with inputs {listed}" if needed else "one number, as 92%"
            message = f"variant {variant.name!r} of {operator.name!r} needs an accuracy: {how}"
            raise section.error(variants.key(variant.name), message)
