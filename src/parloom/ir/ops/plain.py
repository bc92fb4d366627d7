"""ATen operators without an entry that may stand in a graph: every rank computes them as a whole.

A graph may come from a file, so what it can call is a list. On it are functional operators from
tensors to tensors that a trace may leave: none writes to its arguments, makes memory from a pointer
or a file, draws random numbers, or takes indices, pointers or packed weights on trust.
`tests/unit/test_operator_list.py` holds the properties that torch's schemas state.
"""

_FOREACH = (
    "abs add addcdiv addcmul ceil clamp_max clamp_min cos div erf exp expm1 floor lerp log log1p"
    " maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sqrt sub tan tanh trunc"
)

PLAIN = frozenset({
    "_addmm_activation", "_cdist_forward", "_compute_linear_combination", "_euclidean_dist",
    "_fft_c2c", "_fft_c2r", "_fft_r2c", "_grouped_mm", "_int_mm", "_is_all_true", "_is_any_true",
    "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd",
    "_log_softmax", "_logcumsumexp", "_masked_softmax", "_prelu_kernel", "_safe_softmax",
    "_softmax", "_trilinear", "linalg__powsum", "log_sigmoid_forward", "range",
    *(f"_foreach_{name}" for name in _FOREACH.split()),
})  # fmt: skip

# Arguments that graphs never name: where results go or lie, and who draws for them.
NEVER_NAMED = frozenset({
    "out", "device", "layout", "pin_memory", "generator", "names", "unsafe", "non_blocking",
})  # fmt: skip
