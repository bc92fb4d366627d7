"""Every operator that models export has an entry, is written as one that has, or is decided on."""

import re
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parloom.capture import capture
from parloom.capture.spelling import decompositions
from parloom.capture.translate import ALIASES, BATCH_NORM, KEYED, NOISE, RESHAPES
from parloom.ir.graph import Node
from parloom.ir.ops import OPS
from tests.capture.models import run_graph

# What `run_decompositions({})` leaves of them: references/torch_2_13.md section 1.3.
VOCABULARY = """
__and__ _assert_tensor_metadata _native_batch_norm_legit_functional _to_copy _unsafe_view abs
adaptive_avg_pool1d adaptive_avg_pool2d add addmm alias arange avg_pool2d bmm cat clone conv2d copy
cos cross_entropy_loss cumsum div einsum embedding embedding_bag empty_like eq expand fill floor
floor_divide full_like gather ge gelu gt histc index index_put layer_norm le linear log lstm lt
masked_fill max_pool2d mean min mul native_dropout ne neg new_ones new_zeros one_hot pad permute pow
rand relu roll rsqrt scaled_dot_product_attention select select_scatter sigmoid silu sin slice
slice_scatter softmax sort split squeeze stack sub sum tanh topk
transformers.grouped_mm_fallback transpose tril_indices unsqueeze view where zeros zeros_like
"""
# What the training graph has besides, before it is made functional.
BEFORE = """
add_ batch_norm chunk contiguous copy_ div_ dropout fill_ flatten index_put_ lift_fresh_copy
masked_fill_ relu_ reshape to unflatten view_as wrap_with_set_grad_enabled
"""


# What torch's core opset has besides, which is where composite operators come down to.
CORE = """
_embedding_bag _log_softmax _softmax any argmax argmin as_strided bitwise_and constant_pad_nd
convolution empty_permuted fmod index_select logical_not max_pool2d_with_indices minimum
native_layer_norm scalar_tensor split_with_sizes
"""

# Public operators without an entry, and why.
DECIDED = {
    "its shape depends on values, which capture refuses": """
        masked_select nonzero unique_consecutive
    """,
    "draws by call order, which capture refuses": "binomial poisson random",
    "counted where a trace knows the number of bins (capture/assertions.py)": "bincount",
    "made functional before it is translated": "native_batch_norm",
    "reads a file, which plans may not": "from_file",
    "asks for values while it is traced": "linalg_lstsq",
    "of other layouts, memory or devices: replicated, or refused by torch": """
        batch_norm_elemt batch_norm_gather_stats batch_norm_gather_stats_with_counts
        batch_norm_stats batch_norm_update_stats hspmm native_norm resize resize_as
        slice_inverse to_padded_tensor
    """,
    "hardly used: replicated": "hash_tensor linalg__powsum range",
}
OTHER_LAYOUTS = re.compile(
    r"sparse|quant|fake_|cudnn|miopen|mkldnn|fbgemm|^q_|nested|crow|ccol|row_ind|col_ind|qparams"
    r"|int_repr|^fused_|coalesce|^values$|^indices$|^sym_|rowwise"
)


def known() -> set[str]:
    """Names with an entry, or written as others that have one."""
    spelled = {str(op._schema.name).removeprefix("aten::") for op in decompositions()}
    return OPS.keys() | spelled | NOISE | ALIASES | RESHAPES | KEYED | {BATCH_NORM}


def public() -> Iterator[str]:
    """Functional operators on dense tensors that torch offers and does not compose of others."""
    for full in torch._C._dispatch_get_all_op_names():
        if not full.startswith("aten::"):
            continue
        name, _, overload = full.removeprefix("aten::").partition(".")
        found = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        offered = any(hasattr(where, name) for where in (torch, Tensor, F))
        if found is None or not (offered or name.startswith(("linalg_", "fft_", "special_"))):
            continue
        schema = found._schema
        internal = name.startswith("_") or "backward" in name or name.endswith(("_", "_copy"))
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(
            full, "CompositeImplicitAutograd"
        )
        tensors = any("Tensor" in str(r.type) for r in schema.returns)
        if tensors and not (internal or composite or schema.is_mutable or overload.endswith("out")):
            yield name


def test_the_vocabulary_is_covered() -> None:
    assert set(VOCABULARY.split()) | set(CORE.split()) <= known()


def test_every_public_operator_has_an_entry_or_a_decision() -> None:
    decided = [name for names in DECIDED.values() for name in names.split()]
    assert len(decided) == len(set(decided))
    left = {name for name in public() if not OTHER_LAYOUTS.search(name)} - known()
    assert left == set(decided)


class Steps(nn.Module):
    """Everything in `BEFORE` that a model can say."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.norm(x)).transpose(0, 1).contiguous().flatten().unflatten(0, (6, 4))
        first, second = y.reshape(3, 8).view_as(torch.ones(3, 8)).chunk(2, 1)
        z = first.clone().add_(second).relu_().div_(2.0).to(torch.float64).clone()
        z.masked_fill_(z > 1, 0.5)
        z[0].fill_(1.0)
        z[1].copy_(z[2])
        z[at] = 2.0
        with torch.no_grad():
            scale = z.sum() + torch.tensor(2.0)
        result: torch.Tensor = (z * scale).sum()
        return result


def test_what_is_said_before_comes_out_in_the_vocabulary() -> None:
    said = Steps(), {"x": torch.rand(4, 6), "at": torch.tensor([0, 2])}
    graph = capture(*said)
    found = {item.op for item in graph.main.body if isinstance(item, Node)}
    assert found <= OPS.keys()
    assert {"add", "relu", "div", "dropout", "batch_norm", "detach", "index_put"} <= found
    assert not {op for op in found if re.fullmatch(r"[a-z]\w*[a-z]_", op)}, "something is in place"


def moments(x: Tensor) -> Tensor:
    return sum(
        (t.sum() for t in torch.native_layer_norm(x, [4], None, None, 1e-5)), torch.zeros(())
    )


def group_moments(x: Tensor) -> Tensor:
    made = torch.native_group_norm(x.unsqueeze(-1), None, None, 4, 4, 1, 2, 1e-5)
    return sum((t.sum() for t in made), torch.zeros(()))


def images(x: Tensor) -> Tensor:
    """Rows of features in place of some tokens."""
    tokens = x.unsqueeze(0).repeat(2, 1, 1)
    mask = torch.tensor([[True, False, True, True], [False, True, False, False]])
    return tokens.masked_scatter(mask.unsqueeze(-1).expand_as(tokens), x.sin() * 2)


def elements(x: Tensor) -> Tensor:
    return x.masked_scatter(torch.eye(4, dtype=torch.bool), x.cos())


def placed(x: Tensor) -> Tensor:
    y = x.clone()
    y[torch.tensor([True, False, True, False])] = x[:2].exp()
    return y


LOWER = {
    "softmax": lambda x: torch._softmax(x, -1, False) + torch._log_softmax(x, 0, False),
    "convolution": lambda x: torch.convolution(
        x[:, None], x[:2, None, :3], None, [1], [0], [1], False, [0], 1
    ),
    "transposed": lambda x: torch.convolution(
        x[None, ..., None], x[:, :2, None, None], x[0], [1, 1], [0, 0], [1, 1], True, [0, 0], 2
    ),
    "time_first": lambda x: torch.conv_tbc(x[:, None], x[None], x[0], 0),
    "layer_norm": moments,
    "group_norm": group_moments,
    "bags": lambda x: torch._embedding_bag(x, torch.tensor([0, 1, 3]), torch.tensor([0, 2]))[0],
    "grid": lambda x: torch.grid_sampler_2d(
        x[None, None], x[None, :, :2, None].expand(1, 4, 2, 2), 0, 0, False
    ),
    "reflect": lambda x: torch.ops.aten.reflection_pad1d(x, [1, 2]),
    "replicate": lambda x: torch.ops.aten.replication_pad2d(x[None], [1, 1, 1, 0]),
    "images": images,
    "elements": elements,
    "placed": placed,
    "memory": lambda x: x + torch.empty_permuted((4, 4), (1, 0)).fill_(2),
}


class Lower(nn.Module):
    """A function between a linear layer and a loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = LOWER[self.name](self.layer(x)).square().mean()  # type: ignore[no-untyped-call]
        return result


def test_rows_in_place_of_tokens_stay_rows() -> None:
    graph = capture(Lower("images"), {"x": torch.rand(4, 4)})
    shapes = {n.op: n.results[0].spec.shape for n in graph.main.body if isinstance(n, Node)}
    assert shapes["index"] == (8, 4)
    assert shapes["cumsum"] == (8,)


@pytest.mark.parametrize("name", LOWER)
def test_what_operators_come_down_to_is_spelled_as_them(name: str) -> None:
    torch.manual_seed(0)
    model, example = Lower(name), {"x": torch.rand(4, 4)}
    graph = capture(model, example)
    assert {item.op for item in graph.main.body if isinstance(item, Node)} <= OPS.keys()
    expected = model(**example)
    expected.backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    found = run_graph(graph, model, example)["loss"]
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    torch.autograd.backward(found)
    for path, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[path], rtol=1e-5, atol=1e-7)


def test_whole_numbers_are_counted_on_every_device() -> None:
    """Of a model without memory, code that asks for the device takes the way of GPUs."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor) -> Tensor:
            found = x.float() if x.device.type == "cpu" else x.int()
            return (torch.histc(found, 5, 0, 4) * self.weight).sum()

    batch = {"x": torch.tensor([0, 3, 3, 4, 1, 7, 3])}
    module = Counting()
    here = capture(module, batch)
    away = capture(Counting().to("meta"), {"x": batch["x"].to("meta")})
    kinds = [v.spec.dtype for f in away.flat() for v in f.node.results if f.node.op == "histc"]
    assert kinds == ["float64"]
    found = [run_graph(graph, module, batch)["loss"] for graph in (here, away)]
    expected = (torch.tensor([1.0, 1.0, 0.0, 3.0, 1.0]) * module.weight).sum()
    assert found[0] is not None
    assert found[1] is not None
    assert torch.allclose(found[0], expected)
    assert torch.equal(found[0], found[1])
