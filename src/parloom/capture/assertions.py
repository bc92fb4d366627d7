"""What only happens to wrong values: a program that runs does not meet it.

`if ids.max() >= size: raise ...` asks for the value of a tensor, which a trace does not have. Such
a test is answered so that nothing is raised, as assertions on tensors disappear too. `bincount` of
at least so many bins has more where a value is too large; it is counted into those that are
asked for, and a larger value is an index that is out of range.
"""

import ast
import dis
import sys
from contextlib import ExitStack
from linecache import getlines
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import transformer

from parloom.capture.replace import replaced

Span = tuple[int, int, int, int]  # first line, last line, first column, last column


class NothingRaised:
    """While it is active, tensors answer the tests of branches that only raise.

    Wherever they are asked, also inside of torch's own functions; and torch's transformers do not
    look into masks to see whether they are causal, which only chooses a kernel.
    """

    def __init__(self) -> None:
        self.tests: dict[str, tuple[ast.If | ast.Assert, ...]] = {}  # by file
        self.changes = ExitStack()

    def __enter__(self) -> None:
        truth, bincount = Tensor.__bool__, torch.bincount

        def asked(x: Tensor) -> bool:
            answer = self.harmless(sys._getframe(1))
            return truth(x) if answer is None else answer

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            found = counts(*args, **kwargs)
            return bincount(*args, **kwargs) if found is None else found

        def said(mask: Tensor | None, is_causal: bool | None = None, size: object = None) -> bool:
            return is_causal is True

        asked.__name__ = "__bool__"  # as function modes see it
        self.changes = ExitStack()
        self.changes.enter_context(replaced(Tensor, "__bool__", asked))
        self.changes.enter_context(replaced(torch, "bincount", counted))
        self.changes.enter_context(replaced(Tensor, "bincount", counted))
        self.changes.enter_context(replaced(transformer, "_detect_is_causal_mask", said))

    def __exit__(self, *_: object) -> None:
        self.changes.close()

    def harmless(self, frame: FrameType) -> bool | None:
        """The truth of the value that a frame is testing for which it raises nothing.

        None where the test is of another kind.
        """
        span = tested(frame)
        if span is None:
            return None
        filename = frame.f_code.co_filename
        if filename not in self.tests:
            self.tests[filename] = tests_of(filename)
        around = [s for s in self.tests[filename] if inside(span, s.test)]
        if not around:
            return None
        statement = max(around, key=lambda s: s.lineno)
        if isinstance(statement, ast.If) and not only_raises(statement):
            return None
        # Each `not` around the value turns the answer over.
        turned = sum(
            isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and inside(span, node)
            for node in ast.walk(statement.test)
        )
        return isinstance(statement, ast.Assert) is (turned % 2 == 0)


def counts(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
    """`torch.bincount` of `minlength` bins; None where their number is not given."""
    if not minlength:
        return None
    if weights is None:
        return torch.zeros(minlength, dtype=torch.int64, device=x.device).scatter_add(
            0, x.long(), torch.ones_like(x, dtype=torch.int64)
        )
    dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
    zeros = torch.zeros(minlength, dtype=dtype, device=x.device)
    return zeros.scatter_add(0, x.long(), weights.detach().to(dtype))


def tested(frame: FrameType) -> Span | None:
    """Where in the source the value comes from whose truth a frame asks for.

    The instruction that asks is said to be anywhere in its statement; the one before it is exact.
    """
    before = None
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            break
        before = instruction.positions
    if before is None or None in before:
        return None
    first, last, start, end = before
    return (first or 0, last or 0, start or 0, end or 0)


def only_raises(statement: ast.If) -> bool:
    """Whether all that a branch does is to raise an error, with its message made before."""
    *made, end = statement.body
    plain = all(isinstance(s, ast.Assign | ast.AnnAssign) for s in made)
    return isinstance(end, ast.Raise) and plain and not statement.orelse


def inside(span: Span, node: ast.expr) -> bool:
    """Whether a span of source is part of an expression."""
    first, last, start, end = span
    ends = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return (node.lineno, node.col_offset) <= (first, start) and (last, end) <= ends


def tests_of(filename: str) -> tuple[ast.If | ast.Assert, ...]:
    """All `if` and `assert` statements of a file; none where it cannot be read."""
    try:
        tree = ast.parse("".join(getlines(filename)))
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Assert))
