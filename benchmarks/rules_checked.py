"""Every substitution rule on random shapes: modulo a prime, and in float64 with gradients.

    python benchmarks/rules_checked.py [--shapes 1000] [--rules N] [--jobs 2] [--json FILE]

Sizes are drawn from 1 to 6, so that dims are often equal, or one; `*` stands for one to three dims.
Dims under windows are larger by the places that these need.
Both sides are computed modulo a prime, where opaque functions are hashes, and by the reference
evaluator in float64 (`execute/reference.py`), with the gradient of a random sum of all outputs by
each input. Values and gradients agree to 1e-9 of the largest one, or of one where that is smaller.

Rules that reassociate are also run by torch's kernels of 16 bits, on the draws on which the file
of rules says in which dtypes each may be applied: there neither side has more than twice the error
of the other one, against float64.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from random import Random

import numpy as np
import torch
from common import report
from torch import Tensor

from parloom.execute.reference import run_node
from parloom.ir.graph import Arg as NodeArg
from parloom.ir.graph import Node, Ref
from parloom.rewrite.known import known_rules, partial_rules
from parloom.rewrite.recorded import Floats
from parloom.rewrite.rounding import (
    DRAWS,
    MOST_TIMES,
    NARROW,
    Drawn,
    Errors,
    drawn,
    may_round,
    relative_square,
    shapes_of,
)
from parloom.rewrite.rules import Rule, difference, names_at, only_moves, shapes_at, with_room
from parloom.rewrite.terms import Arg, Extent, Name, Term, size_in

TOLERANCE = 1e-9
LARGEST, MOST_LEAD = 6, 3


def check(found: Rule, shapes: int, seed: int) -> list[str]:
    """How the sides of a rule differ, once for each kind of number; empty where they agree."""
    rng, said = Random(seed), list[str]()
    for draw in range(shapes):
        lead = rng.randint(1, MOST_LEAD)
        names = names_at(found, lead)
        sizes = with_room(found, {name: rng.randint(1, LARGEST) for name in names})
        modular = difference(found, sizes, lead, draw)
        if modular:
            said.append(f"modulo a prime: {modular}")
        floats = difference_in_floats(found, sizes, lead, draw)
        if floats:
            said.append(f"in float64: {floats}")
        if said:
            return said
    return said + [f"in {dtype}: {said}" for dtype, said in differences_in_16_bits(found)]


def differences_in_16_bits(found: Rule) -> Iterator[tuple[str, str]]:
    """The dtypes in which a rule may be applied, though torch's kernels make larger errors."""
    for dtype in NARROW if not only_moves(found) else ():
        times = max(t for own in errors_of_kernels(found, dtype) for t in own.times)
        if may_round(found, dtype) and times > MOST_TIMES:
            yield dtype, f"errors differ by {times:.2f} times"


def errors_of_kernels(found: Rule, dtype: str) -> Iterator[Errors]:
    """What `rounding.errors` says, by torch's kernels."""
    for number, sizes in enumerate(shapes_of(found)):
        squares = []
        for draw in range(DRAWS):
            given = drawn(found, sizes, dtype, (number, draw))
            exact = _with_gradients(found.left, given, sizes, torch.float64)
            narrow = [
                _with_gradients(side, given, sizes, getattr(torch, dtype))
                for side in (found.left, found.right)
            ]
            squares.append([list(map(relative_square, side, exact)) for side in narrow])
        left, right = np.sqrt(np.mean(squares, axis=0)).tolist()
        yield Errors(sizes, tuple(left), tuple(right))


def _with_gradients(
    side: Sequence[Term | Name], given: Drawn, sizes: Mapping[str, int], dtype: torch.dtype
) -> list[Floats]:
    inputs = {
        name: torch.tensor(own).to(dtype).requires_grad_() if own.dtype.kind == "f"
        else torch.tensor(own)
        for name, own in given.inputs.items()
    }  # fmt: skip
    leaves = [own for own in inputs.values() if own.requires_grad]
    outputs = run(side, inputs, sizes)
    upstream = [torch.tensor(own).to(dtype) for own in given.upstream]
    found = [*outputs, *_gradients(outputs, upstream, leaves)]
    return [one.detach().double().numpy() for one in found]


def difference_in_floats(found: Rule, sizes: Mapping[str, int], lead: int, seed: int) -> str:
    """What differs by more than the tolerance in float64; empty where nothing does."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for own, shape in shapes_at(found, sizes, lead):
        if own.below is not None:
            most = size_in(own.below, sizes, 1)
            inputs[own.name] = torch.randint(0, most, shape, generator=generator)
        else:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            inputs[own.name] = drawn.requires_grad_()
    sides = [run(side, inputs, sizes) for side in (found.left, found.right)]
    at = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    for index, (one, other) in enumerate(zip(*sides, strict=True)):
        if not _close(one, other):
            return f"output {index} where {at}"
    leaves = {name: own for name, own in inputs.items() if own.requires_grad}
    upstream = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in sides[0]]
    first, second = (_gradients(side, upstream, list(leaves.values())) for side in sides)
    for name, one, other in zip(leaves, first, second, strict=True):
        if not _close(one, other):
            return f"gradient of {name} where {at}"
    return ""


def run(
    side: Sequence[Term | Name], inputs: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> list[Tensor]:
    """The outputs of one side by the reference evaluator; each call is made once."""
    values, known = dict(inputs), dict[Term, list[str]]()

    def read(arg: Arg) -> NodeArg:
        if isinstance(arg, Name):
            return Ref(arg.name)
        if isinstance(arg, Extent):
            return int(size_in(arg.size, sizes, 1))
        if isinstance(arg, tuple):
            return tuple(map(read, arg))
        return Ref(value(arg)) if isinstance(arg, Term) else arg

    def value(term: Term) -> str:
        call = Term(term.op, term.args)
        if call not in known:
            node = Node(term.op, tuple(map(read, term.args)), (), ())
            made = run_node(node, term.op, values, None)
            known[call] = [f"{len(values)}.{i}" for i in range(len(made))]
            values.update(zip(known[call], made, strict=True))
        return known[call][term.result or 0]

    return [values[own.name if isinstance(own, Name) else value(own)] for own in side]


def _gradients(
    outputs: Sequence[Tensor], upstream: Sequence[Tensor], leaves: Sequence[Tensor]
) -> list[Tensor]:
    pairs = [(a, b) for a, b in zip(outputs, upstream, strict=True) if a.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    flowing, given = zip(*pairs, strict=True)
    found = torch.autograd.grad(flowing, leaves, given, allow_unused=True)
    of_leaves = zip(found, leaves, strict=True)
    return [torch.zeros_like(leaf) if one is None else one for one, leaf in of_leaves]


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.numel() == 0:
        return True
    scale = max(1.0, float(one.detach().abs().max()))
    return float((one - other).detach().abs().max()) <= TOLERANCE * scale


def main() -> int:
    """Print each rule that fails, and counts; exit code 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", type=int, default=1000, help="for each rule")
    parser.add_argument("--rules", type=int, help="a sample of so many; otherwise all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", help="write the failures as JSON")
    args = parser.parse_args()
    began = time.monotonic()
    every = (*known_rules().values(), *partial_rules().values())
    rules = [own.rule for own in every]
    if args.rules:
        rules = Random(args.seed).sample(rules, args.rules)
    failed = list[dict[str, object]]()
    one = partial(check, shapes=args.shapes, seed=args.seed)
    with ProcessPoolExecutor(args.jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for number, (found, said) in enumerate(
            zip(rules, pool.map(one, rules, chunksize=8), strict=True)
        ):
            failed += [{"rule": found.id, "said": own} for own in said]
            for own in said:
                print(f"{found.id}: {own}")
            if number % 50 == 0:
                print(f"{number} of {len(rules)}", file=sys.stderr, flush=True)
    wrong = len({row["rule"] for row in failed})
    print(
        f"{len(rules)} rules on {args.shapes} shapes each, modulo a prime and in float64 with"
        f" gradients: {wrong} differ; {time.monotonic() - began:.0f} s"
    )
    report("rules_checked", failed, args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
