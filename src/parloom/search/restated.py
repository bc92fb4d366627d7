"""A split of an operator in one form of a graph, as one of the same operator in another form.

What else reads a tensor says into which factors its dims are cut, so that an operator may have `n`
in one form, and `n0` and `n1` in another.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from math import prod
from operator import mul

from parloom.errors import LayoutError
from parloom.ir.mesh import Mesh
from parloom.ir.ops import Rule
from parloom.ir.plan import NodeDecision

Axes = tuple[str, ...]
Factors = tuple[tuple[str, Axes], ...]
Run = tuple[str, ...]


def restated(factors: Factors, given: Rule, rule: Rule, mesh: Mesh) -> Factors:
    """Axes on factors of `given` as axes on factors of `rule`, which is of the same tensors; what
    has no place there is left out.
    """
    if given == rule or not factors:
        return factors
    chosen, found = dict(factors), dict[str, Axes]()
    for some, own in _runs(given, rule):
        axes = _outermost(some, given, chosen, mesh)
        for factor, placed in _spread(axes, own, rule, mesh):
            found.setdefault(factor, placed)
    return _legal(found, rule, mesh)


def resembling(factors: Factors, given: Rule, rule: Rule, mesh: Mesh) -> Factors:
    """The axes on each dim of an operator with the rule `given` on those dims of another one, which
    is of tensors of other sizes: of all tensors where both have as many, or of the first result.
    """
    chosen, found = dict(factors), dict[str, Axes]()
    pairs = list(zip(given.results[:1], rule.results[:1], strict=True))
    if len(given.operands) == len(rule.operands):
        pairs += zip(given.operands, rule.operands, strict=True)
    for one, other in pairs:
        for some, own in zip(one, other, strict=False) if len(one) == len(other) else ():
            axes = chain.from_iterable(chosen.get(factor, ()) for factor in some)
            for factor, placed in _spread(axes, own, rule, mesh):
                found.setdefault(factor, placed)
    return _legal(found, rule, mesh)


def _legal(found: Mapping[str, Axes], rule: Rule, mesh: Mesh) -> Factors:
    """None of these axes where the rule does not allow them."""
    made = NodeDecision("", tuple((f, axes) for f, axes in found.items() if axes)).factors
    try:
        rule.check(dict(made), mesh, "")
    except LayoutError:
        return ()
    return made


def _runs(given: Rule, rule: Rule) -> Iterator[tuple[Run, Run]]:
    """Factors of both that are next to each other in a dim, and as large together."""
    pairs = zip((*given.operands, *given.results), (*rule.operands, *rule.results), strict=True)
    for one, other in pairs:
        for some, own in zip(one, other, strict=True):
            ends = [
                list(accumulate(map(by.size, names), mul))
                for by, names in ((given, some), (rule, own))
            ]
            # A dim of samples is that of a microbatch in one of them.
            if some == own and ends[0][-1:] != ends[1][-1:]:
                yield from (((name,), (name,)) for name in own)
                continue
            begin = [0, 0]
            for size in (size for size in ends[0] if size in ends[1]):
                stop = [sizes.index(size) + 1 for sizes in ends]
                yield some[begin[0] : stop[0]], own[begin[1] : stop[1]]
                begin = stop


def _outermost(some: Run, rule: Rule, chosen: Mapping[str, Axes], mesh: Mesh) -> Iterator[str]:
    """The axes that cut a run of factors into chunks: those on a factor, as far as all before it
    is cut to single elements.
    """
    for factor in some:
        axes = chosen.get(factor, ())
        yield from axes
        if prod(mesh[axis].size for axis in axes) < rule.size(factor):
            return


def _spread(axes: Iterator[str], own: Run, rule: Rule, mesh: Mesh) -> Sequence[tuple[str, Axes]]:
    """These axes on factors, the outermost first, as far as they divide them."""
    left, found = list(axes), list[tuple[str, Axes]]()
    for factor in own:
        size, placed = rule.size(factor), list[str]()
        while left and size > 1 and not size % mesh[left[0]].size:
            size //= mesh[left[0]].size
            placed.append(left.pop(0))
        found.append((factor, tuple(placed)))
        if size > 1:
            break
    return found
