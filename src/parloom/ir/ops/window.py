"""Windows that slide along a dim: what a shard needs of its neighbors, and what it then drops.

Rank r of p has rows [r in/p, (r+1) in/p) and makes outputs [r out/p, (r+1) out/p), which read
(out/p - 1) stride + reach rows from r (out/p) stride - padding on. Where in = out stride every rank
needs as many rows of its neighbors; else the numbers drift from rank to rank (valid convolutions,
uneven padding). The exchange brings the most that any rank needs, and each rank drops the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from parloom.ir.ops.opdef import Emission
from parloom.ir.ops.rule import HALO, WHOLE, Site

Halo = Mapping[str, tuple[int, int, int]]
EDGE = "None"  # what stands beyond the ends of the tensor: its first and last rows again


@dataclass(frozen=True, slots=True)
class Slide:
    """A window of `reach` rows that moves by `stride`, from `padding` rows before the first on.

    `before` and `after` are the sizes of the dim; `allowed` says whether it may be sharded.
    """

    dim: int
    before: int
    after: int
    reach: int
    stride: int = 1
    padding: int = 0
    allowed: bool = True

    @property
    def shards(self) -> int:
        """Into how many shards both sides can be cut: the size of the factor."""
        return gcd(self.before, self.after) if self.allowed else 1

    @property
    def slack(self) -> int:
        """Rows by which the ranks' windows drift against their shards, over all of them."""
        return self.before - self.after * self.stride

    def rows(self) -> tuple[int, int]:
        """The most rows that any rank needs from below and from above, for any number of ranks."""
        step = self.slack // max(self.shards, 1)
        below = self.padding + max(0, self.slack - step)
        above = self.reach - self.stride - self.padding + max(-step, -self.slack)
        return max(0, below), max(0, above)


def spatial(slides: Sequence[Slide]) -> tuple[dict[str, int], list[str], list[str], dict[str, str]]:
    """(factor sizes, operand dims, result dims, kinds) for `products`: `s0 u0`, `s0 t0`, ..."""
    sizes: dict[str, int] = {}
    kinds: dict[str, str] = {}
    for i, slide in enumerate(slides):
        shards = slide.shards
        sizes |= {f"s{i}": shards, f"u{i}": slide.before // max(shards, 1),
                  f"t{i}": slide.after // max(shards, 1)}  # fmt: skip
        kinds |= {f"s{i}": HALO, f"u{i}": WHOLE, f"t{i}": WHOLE}
    count = range(len(slides))
    return sizes, [f"s{i} u{i}" for i in count], [f"s{i} t{i}" for i in count], kinds


def halo_of(slides: Sequence[Slide]) -> Halo:
    """Halo factor -> (tensor dim, rows from below, rows from above)."""
    return {f"s{i}": (slide.dim, *slide.rows()) for i, slide in enumerate(slides)}


def windowed(e: Emission, slides: Sequence[Slide], x: str, fill: str = "0") -> str:
    """Code of operand 0 after the exchange, with just the rows that this rank's windows read.

    `fill` is the code of what stands beyond the ends of the whole tensor; zeros are there already.
    """
    for i, slide in enumerate(slides):
        axes = e.axes_of(f"s{i}")
        if not axes:
            continue
        ranks = e.mesh.size(axes)
        below, above = slide.rows()
        if fill != "0" and (below or above):
            rows = f"below={below}, above={above}, value={fill}"
            x = f"rt.border({x}, ctx, {axes!r}, dim={slide.dim}, {rows})"
        length = (slide.after // ranks - 1) * slide.stride + slide.reach
        if length != slide.before // ranks + below + above:
            first = f"start={below - slide.padding}, drift={-(slide.slack // ranks)}"
            x = f"rt.rows({x}, ctx, {axes!r}, dim={slide.dim}, {first}, length={length})"
    return x


def slides_of(site: Site, shapes: Sequence[tuple[int, int, int, bool]], lead: int) -> list[Slide]:
    """A slide per spatial dim, from (reach, stride, padding, allowed) of each."""
    before, after = site.operands[0].shape[lead:], site.results[0].shape[lead:]
    return [
        Slide(lead + i, before[i], after[i], reach, stride, padding, allowed)
        for i, (reach, stride, padding, allowed) in enumerate(shapes)
    ]


def spread(values: tuple[int, ...], count: int) -> tuple[int, ...]:
    """One number for every spatial dim, or one each."""
    return values * count if len(values) == 1 else values
