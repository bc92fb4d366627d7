"""What a composition holds as the last of the calls that recompute runs backward: what these calls
keep, and what one of them makes again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parloom.linear_program import LinearProgram
from parloom.search.layout_model import LayoutModel
from parloom.search.model import Floats
from parloom.search.prices import KEPT
from parloom.search.program import Block


@dataclass(frozen=True, slots=True)
class Remaking:
    """`column` counts calls of a block that recompute, at most `count`: each keeps `kept` bytes and
    makes `again` bytes again.
    """

    column: int
    count: int
    kept: float
    again: float


Blocks = Sequence[Sequence[Remaking]]
"""The variants that recompute of each block."""


def remaking(
    block: Block, rows: Mapping[int, Floats], fast: Floats, in_flight: float
) -> list[Remaking]:
    """Of columns of a block with these rows those that recompute: they keep less than `fast`, of
    each microbatch in flight.
    """
    kept = {column: float(some[KEPT]) for column, some in rows.items()}
    most, calls = float(fast[KEPT]), len(block.prefixes)
    return [
        Remaking(c, calls, in_flight * size, most - size) for c, size in kept.items() if size < most
    ]


def limit_remade(
    program: LinearProgram, blocks: Blocks, stored: Mapping[int, float], most: int, unit: float
) -> None:
    """Rows that keep this instant of each block below column `most`, in units of bytes; each column
    stores so many bytes.
    """
    # One row adds up what all columns store: rows of many blocks stay short.
    total = program.column(0.0)
    program.row({total: -1.0, **{column: size / unit for column, size in stored.items()}}, high=0.0)
    for some in filter(None, blocks):
        again = program.column(0.0)
        for call in some:
            used = call.column
            if call.count > 1:
                used = program.column(0.0, 0, 1, integer=True)
                program.row({call.column: 1.0, used: -float(call.count)}, high=0.0)
            program.row({again: 1.0, used: -call.again / unit}, low=0.0)
        kept = {call.column: call.kept / unit for call in some}
        program.row({most: -1.0, total: 1.0, again: 1.0, **kept}, high=0.0)


def remade_bytes(blocks: Blocks, counts: Sequence[int]) -> float:
    """The same bytes of a solution, beside what is stored; 0 where nothing recomputes."""
    most = 0.0
    for some in blocks:
        used = [call for call in some if counts[call.column]]
        kept = sum(counts[call.column] * call.kept for call in used)
        most = max(most, kept + max((call.again for call in used), default=0.0))
    return most


def leaving_bytes(layouts: LayoutModel, block: Block, values: Sequence[int]) -> float:
    """What a call of a block makes for others, which it keeps even where it recomputes all."""
    own = {index for index, _ in block.operators}
    made = {
        (flow.operator, flow.result): flow.spec
        for flow in layouts.program.flows
        if flow.crosses and flow.differentiable and flow.operator in own
    }
    total = 0
    for (index, result), spec in made.items():
        choice, _ = layouts.options[index].option(values[index])
        state = layouts.options[index].menu.choices[choice].results[result]
        total += layouts.prices.held_bytes(spec, state)
    return float(total)
