"""What kernels do with numbers, as hashes: equal where they do the same arithmetic.

Terms of a sum have no order, as kernels may take any; but a sum of sums is not the sum of all. So
two programs that are equal here only move data, and two that are equal modulo a prime alone
(`modular.py`) round differently.
"""

from collections.abc import Sequence
from fractions import Fraction

from parloom.ir.ops.algebra import Names
from parloom.rewrite.modular import Ints, Numbers


class Arithmetic(Numbers):
    """The algebra of hashes of what was computed."""

    def product(self, names: Sequence[Names], result: Names, parts: Sequence[Ints]) -> Ints:
        summed = {name for some in names for name in some} - set(result)
        if len(parts) < 2:
            found = super().product(names, result, parts)
            return self.opaque("sum", found) if summed else found
        every = [*result, *sorted(summed)]
        each = self.opaque("product", super().product(names, every, parts))
        if not summed:
            return each
        return self.opaque("sum", super().product([every], result, [each]))

    def add(self, one: Ints, other: Ints) -> Ints:
        return self.opaque("sum", super().add(one, other))

    def scale(self, part: Ints, factor: Fraction) -> Ints:
        return part if factor == 1 else self.opaque(f"{factor} times", part)
