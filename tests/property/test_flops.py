"""The work that entries say they do is what torch counts in them, forward and backward."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from parloom.ir.ops import OPS
from tests.property.cases import all_cases
from tests.property.one_operator import Program

PRODUCTS = frozenset({
    "linear", "mm", "bmm", "mv", "dot", "matmul", "addmm", "baddbmm", "addbmm", "einsum",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention",
})  # fmt: skip
# torch counts no product in these, or other ones than the operator needs.
COUNTED_OTHERWISE = {
    "dot": "no product of matrices", "mv": "no product of matrices",
    "matmul-vectors": "no product of matrices", "matmul-left_vector": "a vector is no matrix",
    "matmul-right_vector": "a vector is no matrix", "linear-vector": "a vector is no matrix",
    "linear-weight_vector": "a vector is no matrix",
    "linear-weight_vector_bias": "a vector is no matrix",
    "mm-complex": "four real products", "einsum-three": "pair by pair",
    "addbmm": "torch does not know it", "einsum-diagonal": "no product", "einsum-one": "no product",
}  # fmt: skip
# Backward: torch does not divide the channels by the groups; fused attention computes scores again.
FORWARD_ONLY = ("conv2d-groups", "conv2d-depthwise", "conv_transpose2d-groups", "scaled_dot")
CASES = {c.id: c for c in all_cases() if c.op in PRODUCTS and c.id not in COUNTED_OTHERWISE}


@pytest.mark.parametrize("name", CASES)
def test_products_are_counted_as_torch_does(name: str) -> None:
    program = Program(CASES[name])
    op = OPS[program.case.op]
    leaves = {n: t.clone() for n, t in program.tensors.items()}
    for leaf in leaves.values():
        leaf.requires_grad_(leaf.is_floating_point())
    with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH):
        made = program.run(leaves)
    assert op.flops(program.site, program.rule) == forward.get_total_flops()
    if name.startswith(FORWARD_ONLY):
        return
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward([t.sum() for t in made])
    assert backward.get_total_flops() == op.backward_ratio * forward.get_total_flops()
