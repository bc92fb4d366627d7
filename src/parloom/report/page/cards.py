"""What a click on an operator or a parameter shows: the content of `parloom explain PLAN NAME`."""

from collections.abc import Callable, Iterator
from typing import Any

from parloom.ir.graph import FlatNode
from parloom.report.case import Case, StageCase
from parloom.report.explain_name import name_explained
from parloom.report.names import Names, Tensor
from parloom.report.page.graph import operator_times
from parloom.report.page.sides import Side
from parloom.search.runner_up import Play

Document = dict[str, Any]
Say = Callable[[str], None]
# Ways of an operator that are played for its card, and the least share of all operators' time that
# an operator has whose ways are.
MOST_WAYS, LEAST_SHARE = 4, 0.005


def cards(side: Side, say: Say) -> dict[str, Document]:
    """One card for each operator of a block kind, by place and key as `place|key`."""
    found: dict[str, Document] = {}
    for case in side.cases():
        wanted = [
            (place, flat)
            for place, flat in _operators(case)
            if f"{place}|{flat.node.key}" not in found
        ]
        names = Names(case.pcg.graph)
        times = {place: sum(both) for place, both in operator_times([case]).items()}
        least = LEAST_SHARE * sum(times.values())
        for number, (place, flat) in enumerate(wanted):
            is_large = times.get((place, flat.node.key), 0) > least
            card = name_explained(
                case, names.find(flat.key), _player(side, case), MOST_WAYS * is_large
            )
            found[f"{place}|{flat.node.key}"] = card
            if is_large:
                say(f"other ways of {flat.key}: {number + 1} of {len(wanted)} operators")
    return found


def parameter_cards(side: Side) -> dict[str, Document]:
    """One card for each parameter, and for those of other calls of its block kind that are stored
    alike, by place and name as `place|name`. No other way is played.
    """
    found: dict[str, Document] = {}
    known: set[str] = set()
    for case in side.cases():
        for parameter in case.pcg.parameters:
            target = parameter.input.target
            if target in known:
                continue
            named = Tensor(target, input=parameter.input)
            card = name_explained(case, named, _player(side, case), 0)
            known.update(card["alike"])
            found[f"{card['place']}|{target}"] = card
    return found


def _player(side: Side, case: Case) -> Play:
    return case.play if isinstance(case, StageCase) else side.play


def _operators(case: Case) -> Iterator[tuple[str, FlatNode]]:
    """Each operator of each block kind in the kind's first call."""
    main, seen = case.pcg.graph.main.name, set[tuple[str, str]]()
    for flat in case.pcg.graph.flat():
        place = "main" if flat.function == main else flat.function
        if (place, flat.node.key) not in seen:
            seen.add((place, flat.node.key))
            yield place, flat
