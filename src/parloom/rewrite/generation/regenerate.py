"""Regenerate the substitution rules, and print what is found; write them with --out and --partial.

    python -m parloom.rewrite.generation.regenerate [--calls N] [--family NAME ..] [--out FILE]
        [--partial FILE]

Enumerates the programs of each family, leaves out renamings, proves every candidate twice, and
picks the basis: rules that do not follow from those before them, over all families. Of families of
partly equal programs (`partial.py`) all rules that are proved twice are kept. Prints, for
each family and in all, how many rules are proved, how many of them say more than a rule of a part
of them (TASO's pruning), and how many the basis has; `--out` writes the basis, and in which dtypes
of 16 bits each of its rules may be applied, `--partial` those of partly equal programs.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parloom.rewrite.families import FAMILIES
from parloom.rewrite.generate import Family, Generator
from parloom.rewrite.generation import partial
from parloom.rewrite.generation.axioms import prove_by_axioms
from parloom.rewrite.generation.basis import basis, distinct, says_more
from parloom.rewrite.generation.halos import prove_by_halos
from parloom.rewrite.generation.partial import Partial
from parloom.rewrite.known import VERSION
from parloom.rewrite.rounding import NARROW, may_round
from parloom.rewrite.rules import Rule, id_of, prove, rule, with_lead


@dataclass(frozen=True, slots=True)
class Counts:
    """What a family has: programs tried, classes, equal pairs, renamings left out, rules that both
    proofs hold for, those that one refuses, those left after TASO's pruning, and those that do not
    follow from rules before.
    """

    family: str
    tried: int
    classes: int
    equal: int
    distinct: int
    proved: int
    refused: int
    pruned: int
    basis: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.family}: {self.tried} programs, {self.classes} classes, {self.equal} equal"
            f" pairs, {self.distinct} but for names, {self.proved} proved twice, {self.refused}"
            f" refused, {self.pruned} after TASO's pruning, {self.basis} in the basis,"
            f" {self.seconds:.1f} s"
        )


def regenerate(families: Sequence[Family]) -> Iterator[tuple[Counts, list[Rule]]]:
    """The rules that each family adds to the basis, with counts."""
    known = commuting(families)
    for family in families:
        began = time.monotonic()
        generator = Generator(family)
        found = distinct(generator.run())
        refused, example = Counter[str](), dict[str, str]()
        proved = []
        for candidate in found:
            reason = prove(candidate) or prove_by_axioms(candidate)
            if reason:
                refused[reason] += 1
                example.setdefault(reason, candidate.id)
            else:
                proved.append(candidate)
        more = basis([with_lead(own) or own for own in proved], known)
        known += more
        yield (
            Counts(
                family.name,
                generator.tried,
                len(generator.classes),
                len(generator.equal),
                len(found),
                len(proved),
                refused.total(),
                sum(map(says_more, proved)),
                len(more),
                time.monotonic() - began,
            ),
            more,
        )
        for reason, number in refused.most_common(3):
            print(f"  refused {number}: {reason}; as {example[reason]}")


@dataclass(frozen=True, slots=True)
class PartialCounts:
    """What a family of partly equal programs has: programs tried, classes, pairs that are equal on
    a part, rules but for names, those that both proofs hold for, and those that one refuses.
    """

    family: str
    tried: int
    classes: int
    pairs: int
    distinct: int
    proved: int
    refused: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.family}: {self.tried} programs, {self.classes} classes, {self.pairs} pairs"
            f" equal on a part, {self.distinct} corrected but for names, {self.proved} proved"
            f" twice, {self.refused} refused, {self.seconds:.1f} s"
        )


def corrected(families: Sequence[Family]) -> Iterator[tuple[PartialCounts, list[Rule]]]:
    """The rules of partly equal programs of each family, with counts."""
    for family in families:
        began = time.monotonic()
        programs = Partial(family)
        found = distinct(list(programs.candidates()))
        proved = [own for own in found if not prove(own) and not prove_by_halos(own)]
        yield (
            PartialCounts(
                family.name,
                programs.generator.tried,
                len(programs.generator.classes),
                len(list(programs.pairs())),
                len(found),
                len(proved),
                len(found) - len(proved),
                time.monotonic() - began,
            ),
            proved,
        )


def commuting(families: Sequence[Family]) -> list[Rule]:
    """That operators commute, which no candidate says: operands come in one order."""
    operators = (own for family in families for own in family.operators)
    return [
        rule(f"{op} commutes", "x[*], y[*]", [f"{op}(x, y)"], [f"{op}(y, x)"])
        for op in dict.fromkeys(own.op for own in operators if own.commutes)
    ]


def document(rules: Sequence[Rule]) -> str:
    """Rules as JSON, one line each: for any dims in front where that is proved, too."""
    body = ",\n  ".join(json.dumps(entry(with_lead(own) or own)) for own in rules)
    return f'{{"version": {VERSION}, "rules": [\n  {body}\n]}}\n'


def entry(found: Rule) -> dict[str, Any]:
    """A rule as JSON values."""
    inputs, sides = ", ".join(map(str, found.inputs)), (found.left, found.right)
    left, right = (list(map(str, side)) for side in sides)
    return {
        "id": id_of(found, inputs, left, right),
        "inputs": inputs,
        "left": left,
        "right": right,
        "narrow": [dtype for dtype in NARROW if may_round(found, dtype)],
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m parloom.rewrite.generation.regenerate",
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="All families take about 16 minutes.",
    )
    parser.add_argument(
        "--calls",
        type=int,
        metavar="N",
        help="at most so many calls on a side; otherwise two or three, by the family",
    )
    names = [own.name for own in (*FAMILIES, *partial.FAMILIES)]
    parser.add_argument(
        "--family",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"only this one; may be given several times; there are: {', '.join(names)}",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the basis as JSON")
    parser.add_argument(
        "--partial", type=Path, metavar="FILE", help="write rules of partly equal programs as JSON"
    )
    args = parser.parse_args()
    asked = [own for own in FAMILIES if not args.family or own.name in args.family]
    if args.calls:
        asked = [replace(own, most_calls=min(own.most_calls, args.calls)) for own in asked]
    found, proved, pruned = commuting(asked), 0, 0
    for counts, rules in regenerate(asked):
        print(counts, flush=True)
        found += rules
        proved += counts.proved
        pruned += counts.pruned
    if asked:
        print(f"rules proved, without renamings: {proved}; after TASO's pruning: {pruned}")
        print(f"basis: {len(found)} rules, {len(commuting(asked))} of them that operators commute")
    if args.out is not None:
        args.out.write_text(document(found), encoding="utf-8")
    parts = [own for own in partial.FAMILIES if not args.family or own.name in args.family]
    _regenerate_partial(parts, args.partial)
    return 0


def _regenerate_partial(families: Sequence[Family], out: Path | None) -> None:
    found = list[Rule]()
    for counts, rules in corrected(families):
        print(counts, flush=True)
        found += rules
    if families:
        print(f"rules of partly equal programs: {len(found)}")
    if out is not None:
        out.write_text(document(found), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
