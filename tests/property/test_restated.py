"""A split in one form of a graph, said of another form: the same chunks on the same devices."""

from itertools import product
from random import Random

import pytest

from parloom.ir.mesh import grid
from parloom.ir.ops import Rule
from parloom.search.restated import restated

MESH = grid({"x": 2, "y": 2, "z": 3})


def rule_of(*sizes: int) -> Rule:
    """One tensor of one dim, in factors of these sizes; a dim of samples beside it."""
    names = tuple(f"n{i}" for i in range(len(sizes)))
    dims = (("d0",), names)
    return Rule((("d0", 12), *zip(names, sizes, strict=True)), (dims,), (dims,))


def random_rules(rng: Random) -> tuple[Rule, Rule]:
    """The same dim in factors of two kinds."""
    digits = [rng.choice((2, 3, 4)) for _ in range(4)]

    def cut() -> Rule:
        sizes = [digits[0]]
        for digit in digits[1:]:
            if rng.random() < 0.5:
                sizes.append(digit)
            else:
                sizes[-1] *= digit
        return rule_of(*sizes)

    return cut(), cut()


def legal(rule: Rule) -> list[dict[str, tuple[str, ...]]]:
    """All ways to put the axes, in order, on factors."""
    found = []
    for places in product((None, *rule.shardable), repeat=len(MESH.axes)):
        chosen: dict[str, tuple[str, ...]] = {}
        for axis, factor in zip(MESH.axes, places, strict=True):
            if factor is not None:
                chosen[factor] = (*chosen.get(factor, ()), axis.name)
        if all(rule.size(f) % MESH.size(axes) == 0 for f, axes in chosen.items()):
            found.append(chosen)
    return found


def boxes(rule: Rule, chosen: dict[str, tuple[str, ...]]) -> list[frozenset[int]]:
    """The elements of the dim that each rank has."""
    names = [name for name, _ in rule.sizes if name != "d0"]
    found = []
    for rank in range(MESH.num_ranks):
        at = MESH.coordinates(rank)
        parts = []
        for name in names:
            begin, length = 0, rule.size(name)
            for axis in chosen.get(name, ()):
                length //= MESH[axis].size
                begin += at[axis] * length
            parts.append(range(begin, begin + length))
        elements = set()
        for place in product(*parts):
            number = 0
            for name, digit in zip(names, place, strict=True):
                number = number * rule.size(name) + digit
            elements.add(number)
        found.append(frozenset(elements))
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(20))
def test_the_same_elements_as_far_as_they_can_be_said(seed: int) -> None:
    given, rule = random_rules(Random(seed))
    for chosen in legal(given):
        found = dict(restated(tuple(chosen.items()), given, rule, MESH))
        rule.check(found, MESH, "")
        for mine, its in zip(boxes(given, chosen), boxes(rule, found), strict=True):
            assert mine <= its
        same = any(boxes(rule, other) == boxes(given, chosen) for other in legal(rule))
        kept = {axis for axes in found.values() for axis in axes}
        if same and kept == {axis for axes in chosen.values() for axis in axes}:
            assert boxes(rule, found) == boxes(given, chosen)
        assert found.get("d0") == chosen.get("d0")


def test_outer_factors_are_those_of_the_whole() -> None:
    fine, whole = rule_of(4, 3), rule_of(12)
    assert dict(restated((("n0", ("x", "y")),), fine, whole, MESH)) == {"n0": ("x", "y")}
    assert dict(restated((("n0", ("x", "y")), ("n1", ("z",))), fine, whole, MESH)) == {
        "n0": ("x", "y", "z")
    }
    # The inner factor alone is no chunk of the whole.
    assert restated((("n1", ("z",)),), fine, whole, MESH) == ()
    assert dict(restated((("n0", ("x", "y", "z")),), whole, fine, MESH)) == {
        "n0": ("x", "y"),
        "n1": ("z",),
    }
