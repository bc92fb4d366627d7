"""Caches of attention: new keys and values are written where they belong, into the memory that is
there.

`parloom.write_cache(cache, dim, position, new)` is the cache with `new` from `position` on along
`dim`; without a position, from its beginning. A cache has no other reader than what writes to it,
so nobody sees the memory before.
"""

from collections.abc import Iterator

from parloom.ir.graph import Ref
from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.rule import OFFSET, WHOLE, Rule, Site, build, no_flops

WRITE_CACHE = "parloom.write_cache"


def _names(site: Site) -> Iterator[list[str]]:
    """The factors of each tensor's dims."""
    dim = site.dim(1, len(site.operands[0].shape))
    cache = [f"w{d}" if d == dim else f"d{d}" for d in range(len(site.operands[0].shape))]
    yield cache
    if isinstance(site.arg(2), Ref):
        yield []
    yield ["i" if d == dim else name for d, name in enumerate(cache)]


def _rule(site: Site) -> Rule:
    """Every dim may be sharded; a rank with a part of the written one takes what belongs there."""
    cache, *rest = _names(site)
    (written,) = (name for name in cache if name[0] == "w")
    return build([cache, *rest], [cache], site, {written: OFFSET, "i": WHOLE})


def _emit(e: Emission) -> str:
    dim = e.site.dim(1, len(e.site.operands[0].shape))
    parts = [e.arg(0), str(dim), e.arg(2), e.arg(3)]
    if e.axes_of(f"w{dim}"):
        parts += ["ctx", e.operand_digits(dim)]
    return f"rt.write_cache({', '.join(parts)})"


OPS: tuple[OpDef, ...] = (
    OpDef(WRITE_CACHE, _rule, _emit, no_flops, view=True, writes=(-1,), differentiable=False),
)
