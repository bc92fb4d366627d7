"""What a click on an operator or a parameter shows: the content of `parloom explain PLAN NAME`."""

from collections.abc import Callable, Iterator
from typing import Any

from parloom.cost.ledger import MAIN
from parloom.ir.graph import FlatNode
from parloom.report.case import Case, Place, StageCase
from parloom.report.edges import PS, own_shares, runs_of
from parloom.report.explain_name import name_explained
from parloom.report.names import Names, Tensor
from parloom.report.page.graph import operator_times
from parloom.report.page.sides import Side
from parloom.search.runner_up import Play

Document = dict[str, Any]
Split = tuple[tuple[str, int, str], ...]
"""Axes with their sizes, and what they split."""
Say = Callable[[str], None]
# Ways of an operator that are played for its card, and the least share of all operators' time that
# an operator has whose ways are.
MOST_WAYS, LEAST_SHARE = 4, 0.005


def cards(side: Side, say: Say) -> dict[str, Document]:
    """Cards of operators, by place and key as `place|key`: one for all calls of a block kind, in
    any stage, that are split alike; of other calls as `place|name`.
    """
    found: dict[str, Document] = {}
    ids: dict[tuple[Place, Split], str] = {}
    for case in side.cases():
        names = Names(case.pcg.graph)
        times = {place: sum(both) for place, both in operator_times([case]).items()}
        least = LEAST_SHARE * sum(times.values())
        for place, flat in _operators(case):
            ways = case.assigned.get(flat.key, {})
            split = tuple(sorted((axis, case.mesh[axis].size, what) for axis, what in ways.items()))
            if (place, split) not in ids:
                is_large = times.get(place, 0) > least
                most = MOST_WAYS * is_large
                card = name_explained(case, names.find(flat.key), _player(side, case), most)
                first = f"{place[0]}|{place[1]}"
                ids[place, split] = f"{place[0]}|{flat.key}" if first in found else first
                found[ids[place, split]] = card | {"alike": [], "alike_s": 0.0}
                if is_large:
                    say(f"other ways of {flat.key}")
            card = found[ids[place, split]]
            card["alike"].append(flat.key)
            card["alike_s"] += sum(map(runs_of(case, flat).ps, own_shares(case, flat))) / PS
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


def _operators(case: Case) -> Iterator[tuple[Place, FlatNode]]:
    """Each operator of each call."""
    main = case.pcg.graph.main.name
    for flat in case.pcg.graph.flat():
        yield (MAIN if flat.function == main else flat.function, flat.node.key), flat
