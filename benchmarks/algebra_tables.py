"""Tables of `algebra.py`: steps and bytes by method, ratios that are large, and savings by rule."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from algebra_plans import FORBIDDEN, NO_REWRITES, SLOWER, Row

Case = tuple[str, str]
"""A model and a cluster."""
By = Mapping[Case, Mapping[str, Row]]
LARGE = 1.2
# What counts as equal, of steps.
ALIKE = 1e-3
SLOW_PLANNING = 1.3


def by_case(rows: Sequence[Row]) -> By:
    """Rows by case and method."""
    found = defaultdict[Case, dict[str, Row]](dict)
    for row in rows:
        found[row["model"], row["cluster"]][row["method"]] = row
    return found


def faults(rows: Sequence[Row]) -> list[str]:
    """Where `auto` is slower than another method, or a plan cannot be read back."""
    found = []
    for case, own in by_case(rows).items():
        auto, where = own.get("auto", {}), " on ".join(case)
        for method, row in own.items():
            slower = auto.get("step_s", 0) > row.get("step_s", float("inf")) * (1 + SLOWER)
            if slower:
                ratio = auto["step_s"] / row["step_s"]
                found.append(f"{where}: auto takes {ratio:.5f} times as long as {method}")
            if "step_s" in row and not auto.get("step_s"):
                found.append(f"{where}: {method} has a plan, auto has none: {auto.get('error')}")
            if "unreadable" in row:
                found.append(f"{where}: the plan of {method}: {row['unreadable']}")
    return found


def ratio(row: Row | None, auto: Row, of: str = "step_s") -> float | None:
    """Of a step, or of bytes, to that of `auto`; None where one of them is not there."""
    if row is None or "step_s" not in row or "step_s" not in auto:
        return None
    one, other = _amount(row, of), _amount(auto, of)
    if not other:
        return 1.0 if not one else float("inf")
    return one / other


def _amount(row: Row, of: str) -> float:
    return float(row[of] if of != "sent_bytes" else sum(row[of].values()))


def tables(
    rows: Sequence[Row], models: Sequence[str], clusters: Sequence[str], methods: Sequence[str]
) -> str:
    """All tables, as Markdown."""
    of_zoo = by_case([row for row in rows if not _is_random(row)])
    of_random = by_case([row for row in rows if _is_random(row)])
    asked = [(model, cluster) for cluster in clusters for model in models]
    parts = [
        "### Unity's models\n\n" + "\n".join(_cases(of_zoo, asked, methods)),
        _lines("Largest ratios of `sequential` to `auto`", _largest(of_zoo)),
        _lines(f"Steps of `sequential` of at least {LARGE} times that of `auto`", _large(of_zoo)),
        _lines("Layouts alone give what rewrites promise", _of_layouts(of_zoo)),
        _lines("Planning, and without rewrites", _planning(of_zoo)),
        _lines("Planning takes longer than 1.3 times that without rewrites", _slow(of_zoo)),
        _lines("Refused", _refused(of_zoo)),
        _lines("Not run", _left(of_zoo, asked, methods)),
        _lines("Faults", iter(faults([row for row in rows if not _is_random(row)]))),
        "### Random models\n\n" + "\n".join(_random(of_random)),
        _lines("Planning of random models, and without rewrites", _planning(of_random)),
        _lines("Faults of random models", iter(faults([row for row in rows if _is_random(row)]))),
        _lines(f"Random models with a ratio of at least {LARGE}", _large(of_random)),
        _lines("Refused random models", _refused(of_random)),
        "### Rules\n\n" + "\n".join(_rules(by_case(rows))),
    ]
    return "\n\n".join(parts)


def _is_random(row: Row) -> bool:
    return str(row["model"]).startswith("random ")


def _lines(title: str, lines: Iterator[str]) -> str:
    found = list(lines)
    return f"{title}:\n\n" + ("\n".join(f"- {line}" for line in found) if found else "- none")


def _cases(by: By, asked: Sequence[Case], methods: Sequence[str]) -> Iterator[str]:
    """A row for each case; ratios are to the step, or the bytes, of `auto`."""
    others = [method for method in methods if method != "auto"]
    heads = ["model", "cluster", "auto ms", *(f"{m}, step" for m in others), "auto MB sent"]
    heads += [f"{m}, bytes" for m in others[:2]]
    heads += ["auto GB", "rewrites of auto", "of sequential", "CPU s", "without rewrites"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for case in asked:
        own = by.get(case, {})
        auto = own.get("auto")
        if auto is None or "step_s" not in auto:
            continue
        cells = [*case, f"{1e3 * auto['step_s']:.4g}"]
        cells += [_cell(own.get(method), auto) for method in others]
        cells.append(f"{_amount(auto, 'sent_bytes') / 1e6:.4g}")
        cells += [_cell(own.get(method), auto, "sent_bytes") for method in others[:2]]
        cells.append(f"{auto['peak_bytes'] / 1e9:.3g}")
        cells += [_rules_of(own.get(method)) for method in ("auto", "sequential")]
        cells += [_cpu(own.get(method)) for method in ("auto", NO_REWRITES)]
        yield f"| {' | '.join(cells)} |"


def _cell(row: Row | None, auto: Row, of: str = "step_s") -> str:
    found = ratio(row, auto, of)
    if found is not None:
        return f"{found:.3f}"
    return "not run" if row is None else "refused"


def _cpu(row: Row | None) -> str:
    return f"{row['cpu_s']:.1f}" if row and "cpu_s" in row else "-"


def _rules_of(row: Row | None) -> str:
    """Rules by how many rewrites name them."""
    rules = (row or {}).get("rules", {})
    return ", ".join(f"{name} x{count}" for name, count in rules.items()) or "-"


def _both(by: By) -> Iterator[tuple[str, Row, Row, Mapping[str, Row]]]:
    """Cases with a plan of `auto` and one of `sequential`."""
    for case, own in by.items():
        auto, other = own.get("auto", {}), own.get("sequential", {})
        if "step_s" in auto and "step_s" in other:
            yield " on ".join(case), auto, other, own


def _largest(by: By) -> Iterator[str]:
    for of, words in (("step_s", "step"), ("sent_bytes", "bytes")):
        found = [(ratio(other, auto, of) or 0.0, case) for case, auto, other, _ in _both(by)]
        if found:
            most, case = max(found)
            yield f"{words}: {most:.3f}, {case}"


def _large(by: By) -> Iterator[str]:
    for case, auto, other, own in _both(by):
        found = ratio(other, auto) or 0.0
        if found >= LARGE:
            alone = ratio(own.get(NO_REWRITES), auto)
            without = f"{alone:.3f}" if alone is not None else "not run"
            yield (
                f"{case}: {found:.3f}; without rewrites {without}; `auto` {_rules_of(auto)}, "
                f"{auto['name']}; `sequential` {_rules_of(other)}, {other['name']}"
            )


def _of_layouts(by: By) -> Iterator[str]:
    """Cases where a method has rewrites, and `auto` without any is as fast as with all."""
    for case, own in by.items():
        auto = own.get("auto", {})
        alone = ratio(own.get(NO_REWRITES), auto)
        chosen = [m for m in ("auto", "sequential", "unity") if own.get(m, {}).get("rules")]
        if alone is not None and chosen and alone <= 1 + ALIKE:
            words = ", ".join(f"{m} {_rules_of(own[m])}" for m in chosen)
            yield f"{' on '.join(case)}: {alone:.5f} times the step of `auto`; {words}"


def _planning(by: By) -> Iterator[str]:
    """CPU seconds by model, the longest first, and of all."""
    taken: dict[str, list[tuple[float, float]]] = {"all": []}
    for (model, _), own in by.items():
        auto, other = own.get("auto", {}), own.get(NO_REWRITES, {})
        if "step_s" in auto and "step_s" in other:
            for name in {"all", "all" if _is_random(auto) else model}:
                taken.setdefault(name, []).append((auto["cpu_s"], other["cpu_s"]))
    for name, some in sorted(taken.items(), key=lambda one: -sum(took for took, _ in one[1])):
        if some:
            took, without = sum(one for one, _ in some), sum(other for _, other in some)
            ratio = statistics.median(one / other for one, other in some)
            yield (
                f"{name}: {took:.0f} and {without:.0f} CPU s, {took / without:.2f} times; median"
                f" of {len(some)} cases {ratio:.2f}"
            )


def _slow(by: By) -> Iterator[str]:
    for case, own in by.items():
        auto, other = own.get("auto", {}), own.get(NO_REWRITES, {})
        if "step_s" in auto and "step_s" in other:
            more = auto["cpu_s"] / other["cpu_s"]
            if more > SLOW_PLANNING:
                yield (
                    f"{' on '.join(case)}: {auto['cpu_s']:.1f} CPU s, without rewrites"
                    f" {other['cpu_s']:.1f}: {more:.2f} times"
                )


def _refused(by: By) -> Iterator[str]:
    for case, own in by.items():
        why = defaultdict[str, list[str]](list)
        for method, row in own.items():
            if "error" in row:
                why[row["error"]].append(method)
        for error, methods in why.items():
            yield f"{' on '.join(case)}, {', '.join(methods)}: {error}"


def _left(by: By, asked: Sequence[Case], methods: Sequence[str]) -> Iterator[str]:
    """Cases, by cluster, of which some methods have no row."""
    found = defaultdict[tuple[str, tuple[str, ...]], list[str]](list)
    for case in asked:
        left = tuple(method for method in methods if method not in by.get(case, {}))
        if left:
            found[case[1], left].append(case[0])
    for (cluster, left), models in found.items():
        every = "all methods" if len(left) == len(methods) else ", ".join(left)
        yield f"{cluster}: {', '.join(models)}: {every}"


def _random(by: By) -> Iterator[str]:
    """What becomes of random models on each cluster."""
    heads = ["cluster", "models", "refused", "with rewrites of auto", "of sequential"]
    heads += ["method", "faster auto", "median step", "90 %", "most", "median bytes", "most bytes"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for cluster in sorted({cluster for _, cluster in by}):
        every = [own for (_, there), own in by.items() if there == cluster]
        made = [own for own in every if "step_s" in own.get("auto", {})]
        with_rules = [
            str(sum(bool(own.get(m, {}).get("rules")) for own in made))
            for m in ("auto", "sequential")
        ]
        for method in ("sequential", NO_REWRITES):
            pairs = [(own.get(method), own["auto"]) for own in made]
            steps = [r for own, auto in pairs if (r := ratio(own, auto)) is not None]
            sizes = [r for own, auto in pairs if (r := ratio(own, auto, "sent_bytes")) is not None]
            if steps:
                cells = [cluster, str(len(every)), str(len(every) - len(made)), *with_rules, method]
                cells.append(str(sum(r > 1 + ALIKE for r in steps)))
                cells += _spread(steps)
                cells += [_spread(sizes)[0], _spread(sizes)[2]]
                yield f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float]) -> list[str]:
    """Median, 90 % and most."""
    ordered = sorted(values)
    tenth = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return [f"{v:.3f}" for v in (statistics.median(ordered), tenth, ordered[-1])]


def _rules(by: By) -> Iterator[str]:
    """Each rule in a plan of `auto`: how often, and by how much a step is longer without it."""
    chosen, several = defaultdict[str, int](int), set[str]()
    more = defaultdict[str, list[tuple[float, float]]](list)
    for own in by.values():
        auto = own.get("auto", {})
        for rule in auto.get("rules", {}):
            chosen[rule] += 1
            other = own.get(FORBIDDEN + rule, {})
            if "step_s" in other:
                saved_s = other["step_s"] - auto["step_s"]
                more[rule].append((saved_s, saved_s / auto["step_s"]))
        several.update(r for t in auto.get("takes", ()) if t["values"] > 1 for r in t["rules"])
    heads = ["rule", "results", "plans of auto", "priced without it", "sum of ms more"]
    heads += ["median of ms more", "median of % more"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for rule, count in sorted(chosen.items(), key=lambda own: (-own[1], own[0])):
        cells = [rule, "several" if rule in several else "one", str(count), str(len(more[rule]))]
        saved = [1e3 * s for s, _ in more[rule]]
        shares = [100 * share for _, share in more[rule]]
        cells += (
            [f"{sum(saved):.4g}", f"{statistics.median(saved):.4g}"] if saved else ["not run"] * 2
        )
        cells.append(f"{statistics.median(shares):.3g}" if shares else "not run")
        yield f"| {' | '.join(cells)} |"
