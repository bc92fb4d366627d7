"""Matrix functions: the last two dims are one matrix, whole; the dims of a batch are free."""

from collections.abc import Callable

from parloom.ir.ops.opdef import OpDef, Saved, SavedTensors, all_operands
from parloom.ir.ops.rule import WHOLE, Rule, Site, build

_X: SavedTensors = (("operand", 0),)
_Y: SavedTensors = (("result", 0),)


def _rule(vectors: int = 0) -> Callable[[Site], Rule]:
    """All results have the batch dims of the operands; `vectors` of their last dims are whole.

    Dims beyond the batch are whole, whatever their number.
    """

    def rule(site: Site) -> Rule:
        lead = len(site.operands[0].shape) - 2
        batch = [f"d{i}" for i in range(lead)]
        kinds: dict[str, str] = {}
        found: list[list[str]] = []
        for k, spec in enumerate((*site.operands, *site.results)):
            own = [f"w{k}.{i}" for i in range(len(spec.shape) - lead)]
            kinds |= dict.fromkeys(own, WHOLE)
            found.append([*batch[max(0, lead - len(spec.shape)) :], *own])
        count = len(site.operands)
        return build(found[:count], found[count:], site, kinds)

    return rule


def _cubic(factor: float) -> Callable[[Site, Rule], float]:
    """`factor` m n min(m, n) operations per matrix."""

    def flops(site: Site, rule: Rule) -> float:
        *_, m, n = site.operands[0].shape
        return factor * site.operands[0].num_elements * min(m, n)

    return flops


def _all_results(site: Site) -> SavedTensors:
    return tuple(("result", i) for i in range(len(site.results)))


def _entry(
    name: str,
    factor: float,
    saved: Saved,
    differentiable: bool = True,
    detached: tuple[int, ...] = (),
) -> OpDef:
    """An entry; factors as in Golub and Van Loan, Matrix Computations."""
    code = "torch.ops.aten." + name
    return OpDef(
        name, _rule(), code, _cubic(factor), 2.0, saved,
        differentiable=differentiable, detached=detached,
    )  # fmt: skip


OPS: tuple[OpDef, ...] = (
    _entry("linalg_cholesky", 1 / 3, _Y),
    _entry("linalg_cholesky_ex", 1 / 3, _Y),
    _entry("cholesky", 1 / 3, _Y),
    _entry("cholesky_inverse", 2 / 3, (*_X, *_Y)),
    _entry("linalg_inv_ex", 2.0, _Y),
    _entry("linalg_inv", 2.0, _Y),
    _entry("inverse", 2.0, _Y),
    _entry("linalg_pinv", 20.0, (*_X, *_Y)),
    _entry("det", 2 / 3, _X),
    _entry("linalg_det", 2 / 3, _X),
    _entry("logdet", 2 / 3, _X),
    _entry("slogdet", 2 / 3, _X),
    _entry("linalg_slogdet", 2 / 3, _X),
    _entry("linalg_qr", 4 / 3, _all_results),
    _entry("linalg_svd", 20.0, _all_results),
    _entry("linalg_svdvals", 8 / 3, _X),
    _entry("linalg_eigh", 9.0, _all_results),
    _entry("linalg_eigvalsh", 4 / 3, _X),
    _entry("linalg_solve", 2 / 3, lambda site: (*all_operands(site), *_Y)),
    _entry("linalg_solve_triangular", 1.0, lambda site: (("operand", 0), *_Y)),
    _entry("cholesky_solve", 2.0, lambda site: (*all_operands(site), *_Y)),
    _entry("linalg_matrix_exp", 20.0, _X),
    _entry("matrix_power", 4.0, _X),
    _entry("linalg_matrix_power", 4.0, _X),
    _entry("linalg_lu_factor", 2 / 3, _all_results),
    _entry("linalg_lu_factor_ex", 2 / 3, (("result", 0), ("result", 1))),
    _entry("linalg_lu", 2 / 3, _all_results, detached=(0,)),
    _entry("linalg_lu_solve", 2.0, lambda site: (*all_operands(site), *_Y)),
    _entry("lu_unpack", 1.0, (), detached=(0,)),
    _entry("linalg_ldl_factor_ex", 1 / 3, (), differentiable=False),
    _entry("linalg_ldl_solve", 2.0, (), differentiable=False),
    _entry("triangular_solve", 1.0, lambda site: (("operand", 1), *_Y)),
    _entry("linalg_eig", 25.0, _all_results),
    _entry("linalg_eigvals", 10.0, (*_X, *_Y)),  # and vectors, as big as the operand
    _entry("geqrf", 4 / 3, (), differentiable=False),
    _entry("linalg_householder_product", 4 / 3, lambda site: (*all_operands(site), *_Y)),
    _entry("ormqr", 4.0, lambda site: (*all_operands(site), *_Y)),
)
