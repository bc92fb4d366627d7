"""A plan's rewrites, from their text to the graph that they make.

`pad PARAMETER ROWS PADDED_ROWS` pads a vocabulary (`rewrite.pad`); `stripe INPUT DIM RANKS` cuts a
dim of a batch tensor so that ranks can have stripes of it (`rewrite.stripes`); `take VALUES in
FUNCTION by RULES: CALL` computes values in another way (`rewrite.take`); `block MODULE` makes a
block of a module of main, so that it has a policy for its activations as repeated blocks do
(`ir.fold`).
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from parloom.errors import InputError, nearest
from parloom.ir.fold import outline
from parloom.ir.graph import Graph
from parloom.rewrite import folds, merge
from parloom.rewrite.follows import follows_as_named, inexact, named_rules
from parloom.rewrite.horizontal import fusion_names, fusions, is_fusion
from parloom.rewrite.known import base_ids, is_rule, known_rules, partial_rules
from parloom.rewrite.pad import Padding, cut, padded, parse_padding
from parloom.rewrite.stripes import Stripe, parse_stripe, striped
from parloom.rewrite.take import Take, parse_take, with_takes

PROOF = "both sides have equal normal forms for all shapes"
"""How all rules are proved."""
TWICE = "proved a second time by Z3 over typed axioms, and tested in numbers"
"""What rules that come with parloom are beside that."""
BLOCK = re.compile(r"block ([^ ]+)")


def parse_rewrite(text: str) -> Padding | Stripe | Take | str:
    """A padding, stripes, a take, or the module path of a block; raises `InputError`."""
    block = BLOCK.fullmatch(text)
    found = block[1] if block else parse_padding(text) or parse_stripe(text) or parse_take(text)
    if found is None:
        raise InputError(
            f"unknown rewrite {text!r}; there are: pad PARAMETER ROWS PADDED_ROWS,"
            " stripe INPUT DIM RANKS, take VALUES in FUNCTION by RULES: CALL, block MODULE"
        )
    return found


def paddings_of(rewrites: Sequence[str]) -> tuple[Padding, ...]:
    """The paddings among a plan's rewrites."""
    found = map(parse_rewrite, rewrites)
    return tuple(padding for padding in found if isinstance(padding, Padding))


def changes_tensors(rewrites: Sequence[str]) -> bool:
    """Whether a plan's rewrites change the shapes of tensors."""
    return any(isinstance(parse_rewrite(text), Padding | Stripe) for text in rewrites)


def takes_of(rewrites: Sequence[str]) -> tuple[Take, ...]:
    """Values computed in another way, among a plan's rewrites."""
    return tuple(take for take in map(parse_rewrite, rewrites) if isinstance(take, Take))


def rewritten(graph: Graph, rewrites: Sequence[str]) -> Graph:
    """`graph` with a plan's rewrites applied: takes that follow each other together, and what is
    between them in its place, of that what changes tensors first, then all blocks together.

    Raises `InputError` for one that does not apply.
    """
    for run in _runs(rewrites):
        graph = _applied(graph, run)
    return graph


def derived(graph: Graph, rewrites: Sequence[str]) -> Graph:
    """`rewritten`, where each value that is computed in another way follows from the rules that are
    named again; raises `InputError` where it does not.
    """
    for run in _runs(rewrites):
        _check(graph, [one for one in run if isinstance(one, Take)])
        graph = _applied(graph, run)
    return graph


def _check(graph: Graph, takes: Sequence[Take]) -> None:
    """Derive takes that are made together from their rules; raises `InputError`."""
    merges = set(map(str, merge.merges(graph))) if takes else set()
    functions = {own.name: own for own in (*graph.functions, graph.main)}
    for take in takes:
        for name in take.rules:
            if not is_rewrite(name):
                raise InputError(f"{take}: no rule {name!r}{nearest(name, rule_names())}")
        function = functions.get(take.function)
        if function is None:
            is_true = False
        elif all(map(is_fusion, take.rules)):
            is_true = take in fusions(graph, function)
        else:
            is_true = str(take) in merges and set(take.rules) <= set(merge.RULES)
            is_true = is_true or follows_as_named(function, take)
            if reason := inexact(function, named_rules(function, take)):
                raise InputError(f"{take}: errors are more than twice as large by {reason}")
        if not is_true:
            raise InputError(f"{take}: this does not follow from {', '.join(take.rules)}")


def rule_names() -> list[str]:
    """The names of all rules by which values may be computed in another way, but of their cases."""
    return [*merge.RULES, *folds.NAMES, *known_rules(), *partial_rules(), *fusion_names()]


def proof_words(rules: Sequence[str]) -> str:
    """Which proofs these rules have: those of the files, and their cases, have two; what is made
    for the calls of a model as it is needed (merges, fusions, folds) has one.
    """
    once = [name for name in rules if not is_rule(name)]
    twice = [name for name in rules if name not in once]
    if not twice:
        return f"{PROOF}, found as the rewrite was made; there is no second proof"
    words = f"{PROOF}; {TWICE}"
    if once or any(map(_case_words, twice)):
        words += f": {', '.join(f'{name}{_case_words(name)}' for name in twice)}"
    return words + (f"; no second proof of {', '.join(once)}" if once else "")


def _case_words(name: str) -> str:
    return "".join(f" (as {base})" for base in base_ids(name)[:1])


def is_rewrite(name: str) -> bool:
    """Whether this is the name of such a rule, or of a case of one."""
    return name in (*merge.RULES, *folds.NAMES) or is_fusion(name) or is_rule(name)


def before_takes(graph: Graph, rewrites: Sequence[str]) -> Graph:
    """`graph` with the rewrites that come before the first value that is computed in another
    way.
    """
    for run in _runs(rewrites):
        if isinstance(run[0], Take):
            break
        graph = _applied(graph, run)
    return graph


Rewrite = Padding | Stripe | Take | str


def _runs(rewrites: Sequence[str]) -> Iterator[list[Rewrite]]:
    """Rewrites in their order, takes that follow each other together, and all between them."""
    parsed = map(parse_rewrite, rewrites)
    return (list(run) for _, run in groupby(parsed, lambda one: isinstance(one, Take)))


def _applied(graph: Graph, run: Sequence[Rewrite]) -> Graph:
    """`graph` with one run of rewrites; raises `InputError`."""
    takes = [one for one in run if isinstance(one, Take)]
    if takes:
        return with_takes(graph, takes)
    for one in run:
        if isinstance(one, Padding | Stripe):
            changed = padded(graph, one) if isinstance(one, Padding) else striped(graph, one)
            if changed is None:
                raise InputError(f"the rewrite '{one}' does not apply to {graph.name}")
            graph = changed
    modules = [one for one in run if isinstance(one, str)]
    return outline(graph, modules) if modules else graph


def as_stored(graph: Graph, rewrites: Sequence[str]) -> Graph:
    """`graph` over parameters as the rewritten training program stores them.

    Where a padding does not apply (an evaluation program may read padded classes in other ways than
    the loss), the user's rows are cut out of the parameter first. Raises `InputError` for a
    parameter that `graph` has not.
    """
    for padding in paddings_of(rewrites):
        graph = padded(graph, padding) or cut(graph, padding)
    return graph
