"""What plans may call: properties of every operator on the lists, and that the others are refused.

The lists are data; torch's schemas say what the operators on them do.
"""

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverloadPacket

from parloom.capture.operators import check_operators, functional, is_custom, packet
from parloom.errors import VerifyError
from parloom.ir.graph import Node, Ref
from parloom.ir.ops import NEVER_NAMED, OPS, PLAIN, is_operator

TYPES = (
    "Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]", "number", "int",
    "float", "bool", "Optional[int]", "Optional[float]", "Optional[bool]", "Optional[number]",
    "List[int]", "List[number]", "Optional[List[int]]", "Optional[List[float]]", "str",
    "Optional[str]", "List[float]", "List[bool]",
)  # fmt: skip
# Arguments that graphs never name, by type: a dtype is an int to torch's schemas.
PLACED = {"Optional[Device]", "Device", "Optional[Generator]", "Generator", "Optional[List[str]]"}
UNSAFE = torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output
VIEWS_OF_MEMORY = {"as_strided", "as_strided_scatter"}  # their bounds are checked
WORDS = (
    "sparse", "quant", "mkldnn", "cudnn", "miopen", "fbgemm", "nested", "jagged", "csr", "pack",
    "foobar", "test_", "from_file", "resize", "reinterpret", "storage", "backward", "unsafe_masked",
    "async", "symint", "pin_memory", "_copy_from", "cuda", "mps", "fused_", "embedding_bag_forward",
)  # fmt: skip


def aten() -> list[str]:
    """Every operator on the lists that is ATen's."""
    return sorted(n for n in OPS.keys() | PLAIN if "." not in n and hasattr(torch.ops.aten, n))


def overloads(name: str) -> list[str]:
    found: list[str] = packet(name).overloads()  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize("name", aten())
def test_operators_on_the_lists_write_to_nothing(name: str) -> None:
    """Overloads that write have an `out` that must be named, which `check_operators` refuses."""
    found = packet(name)
    assert functional(found)
    for overload in overloads(name):
        schema = getattr(found, overload)._schema
        written = [
            a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        for argument in written:
            assert argument.is_out or not any("Tensor" in str(r.type) for r in schema.returns)
            assert argument.kwarg_only or not argument.is_out, (overload, argument.name)
            assert not argument.has_default_value(), (overload, argument.name)


@pytest.mark.parametrize("name", aten())
def test_operators_on_the_lists_take_tensors_and_numbers(name: str) -> None:
    for overload in functional(packet(name)):
        for argument in overload._schema.arguments:
            kind = str(argument.type)
            assert kind in TYPES or (kind in PLACED and argument.name in NEVER_NAMED), kind
            assert argument.name not in {"filename", "file", "storage", "data_ptr"}


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_what_has_no_entry_is_plain(name: str) -> None:
    assert name not in OPS
    assert not any(word in name for word in WORDS)
    for overload in functional(packet(name)):
        returned = {str(r.type) for r in overload._schema.returns}
        assert returned <= {"Tensor", "List[Tensor]"}
        assert not set(UNSAFE).intersection(overload.tags)
        assert torch.Tag.nondeterministic_seeded not in overload.tags


def test_most_of_torch_is_on_no_list() -> None:
    """Over everything that is registered: private, unsafe and placed operators are refused."""
    refused = 0
    for full in {n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names()}:
        namespace, name = full.split("::")
        op = name if namespace == "aten" else f"{namespace}.{name}"
        # transformers registers functions as a user does, once its models are imported.
        if op in OPS or op in PLAIN or namespace in ("parloom_tests", "transformers"):
            continue
        with pytest.raises(VerifyError, match="may not stand in a graph"):
            packet(op)
        assert namespace != "aten" or not is_operator(op)
        refused += 1
    assert refused > 1500


@pytest.mark.parametrize(
    "op",
    [
        "inductor._reinterpret_tensor", "inductor._alloc_from_pool",
        "inductor.resize_storage_bytes_", "aten.linear", "aten.set_", "parloom.communicate",
        "parloom.keyed_draw", "prims.sin",
        "_foobar", "_unsafe_view", "_unsafe_index_put", "_embedding_bag", "embedding_renorm",
        "sparse_coo_tensor", "_sparse_csr_tensor_unsafe", "from_file", "set", "resize", "bincount",
        "_nested_view_from_buffer", "_reshape_alias", "empty", "empty_strided", "_index_put_impl",
        "unsafe_masked_index", "_segment_reduce_backward", "max_pool2d_with_indices_backward",
        "symm_mem.one_shot_all_reduce", "quantized.linear", "as_strided_", "_lazy_clone", "",
        ".", "aten.", ".relu", "relu.out", "relu.default", "linear.Tensor", "aten::relu",
    ],
)  # fmt: skip
def test_operators_that_are_refused(op: str) -> None:
    with pytest.raises(VerifyError, match="may not stand in a graph"):
        packet(op)


@torch.library.custom_op("parloom_tests::twice", mutates_args=())
def twice(x: Tensor, factor: float) -> Tensor:
    return x * 2 * factor


@torch.library.custom_op("parloom_tests::write", mutates_args=("x",))
def write(x: Tensor) -> Tensor:
    x.add_(1)
    return x.clone()


@torch.library.custom_op("parloom_tests::to_file", mutates_args=())
def to_file(x: Tensor, path: str) -> Tensor:
    return x.clone()


def test_operators_of_the_user_are_functions_of_tensors() -> None:
    assert isinstance(packet("parloom_tests.twice"), OpOverloadPacket)
    for op in ("parloom_tests.write", "parloom_tests.to_file", "parloom_tests.other"):
        assert not is_custom(op)
        with pytest.raises(VerifyError, match="custom_op"):
            packet(op)


@pytest.mark.parametrize("name", sorted(NEVER_NAMED))
def test_where_results_go_is_never_named(name: str) -> None:
    call = Node("add", (Ref("x"), Ref("y")), ((name, Ref("x")),), (), "layer.0")
    with pytest.raises(VerifyError, match=f"layer.0: operator 'add' takes no argument '{name}'"):
        check_operators([call])
