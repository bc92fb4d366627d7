"""What a plan has in the place of rewrites that it may not have."""

from collections.abc import Iterator, Sequence

from parloom.ir.plan import Decisions
from parloom.rewrite.rewrites import takes_of
from parloom.rewrite.take import Take
from parloom.search.pins import Kind, Pin


def instead_words(pins: Sequence[Pin], without: Sequence[str], found: Decisions) -> str:
    """By which other rules `found` computes values for which the rewrites `without` these pins
    have one that is forbidden; empty where it does none of that.
    """
    forbidden = [pin for pin in pins if pin.kind is Kind.REWRITE and pin.forbidden]
    gone = [t for t in takes_of(without) if any(pin.is_about(t.rules) for pin in forbidden)]
    words = (line for own in takes_of(found.rewrites) for line in _words(own, gone))
    return "; ".join(dict.fromkeys(words))


def _words(own: Take, gone: Sequence[Take]) -> Iterator[str]:
    """What is said of a rewrite that takes the place of one that is gone."""
    names = dict(own.taken).values()
    for other in gone:
        if own.function != other.function or set(names).isdisjoint(dict(other.taken).values()):
            continue
        rules = ", ".join(own.rules)
        if (own.values, own.call) == (other.values, other.call):
            yield f"the same by other rules: {rules}"
        else:
            yield f"other rules for {', '.join(names)}: {rules}"
