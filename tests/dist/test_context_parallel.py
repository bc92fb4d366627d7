"""Context parallelism on real processes: rings and gathers, chunks and stripes, equal one
device.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parloom import runtime as rt
from parloom import zoo
from parloom.capture import capture, fingerprint, parameters_of
from parloom.comparators.configuration import Configuration
from parloom.comparators.handmade import plan
from parloom.cost.clusters import load_cluster
from parloom.execute.verify import VerifyReport, verify
from parloom.ir.graph import Graph
from parloom.ir.plan import Decisions, ModelSource, Optimizer, Plan
from parloom.ir.text import print_graph
from parloom.runtime import context_parallel
from parloom.runtime.context_parallel import ALL, BEFORE, COMPARED, UP_TO, Blocks
from parloom.runtime.work import DONE
from parloom.search.stripes import with_stripes

BATCH, SEQ, VOCAB = 4, 16, 24


class Grouped(nn.Module):
    """A causal layer whose query heads share key heads in the kernel itself, and one that is not
    causal, whose keys are those of other positions.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.q, self.k = nn.Linear(width, 16), nn.Linear(width, 8)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (2, 4)).transpose(1, 2)
        attend = nn.functional.scaled_dot_product_attention
        y = attend(q, k, k * 2, is_causal=True, enable_gqa=True, scale=0.3)
        y = y + attend(y, q, q.flip(-2))
        logits = self.head(y.transpose(1, 2).flatten(-2))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@cache
def model(name: str) -> tuple[nn.Module, dict[str, Tensor], Graph]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "batch": BATCH,
        "seq": SEQ,
        "vocab": VOCAB,
        "width": 16,
        "depth": 2,
        "heads": 4,
    }
    if name == "grouped":
        _, batch = zoo.build("gpt", **sizes)
        built: tuple[nn.Module, dict[str, Tensor]] = Grouped(), batch
    else:
        sizes |= {"groups": 2, "inner": 16} if name == "llama" else {}
        built = zoo.build(name, **sizes)
    return *built, capture(*built)


def verified(name: str, chosen: Configuration) -> VerifyReport:
    (part,) = plan(model(name)[2], chosen, load_cluster(f"{chosen.ranks}xcpu"))
    return proved(name, part.decisions)


def proved(name: str, decisions: Decisions) -> VerifyReport:
    module, batch, graph = model(name)
    made = Plan(
        ModelSource(f"zoo:{name}"), "cpus", fingerprint(module, batch), Optimizer("adamw", 2),
        "by hand", decisions, print_graph(graph),
    )  # fmt: skip
    return verify(made, parameters_of(module, graph), batch)


CASES = [
    ("gpt", Configuration(context=2, microbatch=4, ring=True)),
    ("gpt", Configuration(context=4, microbatch=4, ring=True, striped=True)),
    ("llama", Configuration(context=4, microbatch=4, ring=True)),
    ("llama", Configuration(context=4, microbatch=4)),
    ("llama", Configuration(context=4, microbatch=4, striped=True)),
    ("llama", Configuration(2, context=2, microbatch=4, ring=True, striped=True)),
    ("llama", Configuration(
        2, context=2, microbatch=2, num_microbatches=2, ring=True, striped=True,
        sequence_parallel=True, recompute="full",
    )),
    ("gpt", Configuration(2, context=2, microbatch=4, sequence_parallel=True, zero=3)),
    ("gpt", Configuration(
        data=2, context=2, microbatch=2, zero=3, ring=True, striped=True, recompute="selective"
    )),
    ("grouped", Configuration(context=4, microbatch=4, ring=True)),
    ("grouped", Configuration(2, context=2, microbatch=4, ring=True, striped=True)),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "chosen"),
    CASES,
    ids=[f"{n} {' '.join(c.words)} {c.tensor}x{c.context}" for n, c in CASES],
)
def test_a_plan_equals_one_device(name: str, chosen: Configuration) -> None:
    report = verified(name, chosen)
    assert report.passed, report.first_difference
    assert report.num_ranks == chosen.ranks


def test_stripes_of_a_plan_that_was_found_equal_one_device() -> None:
    """As the search tries them: positions over two axes, of which attention has one."""
    _, _, graph = model("llama")
    chosen = Configuration(2, context=2, microbatch=4, ring=True, sequence_parallel=True)
    (part,) = plan(graph, chosen, load_cluster("4xcpu"))
    striped = with_stripes(graph, part.decisions)
    assert striped is not None
    assert striped.rewrites == ("stripe input_ids 1 2", "stripe labels 1 2")
    report = proved("llama", striped)
    assert report.passed, report.first_difference


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_that_does_not_turn_is_seen(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_parallel, "_shift", lambda flat, group: (flat, DONE))
    report = verified("gpt", Configuration(context=ranks, microbatch=4, ring=True, striped=True))
    assert not report.passed


def test_gradients_that_stay_with_the_last_rank_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks: after two steps a block's gradient is with the other one."""
    right = context_parallel._backward

    def stays(*given: object) -> tuple[Tensor, Tensor, Tensor]:
        of_q, of_k, of_v = right(*given)  # type: ignore[arg-type]
        group = given[-1]
        assert isinstance(group, rt.comm.DistributedGroup)
        received, work = context_parallel._shift(torch.cat([of_k.flatten(), of_v.flatten()]), group)
        work.wait()
        return of_q, *context_parallel._unpacked(received, of_k, of_v)

    monkeypatch.setattr(context_parallel, "_backward", stays)
    assert not verified("llama", Configuration(context=2, microbatch=4, ring=True)).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seen", [ALL, UP_TO, BEFORE])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_kernel_and_formula_agree_on_a_block(
    seen: int, key_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a block whose rule is a comparison of indices, which has no kernel."""
    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(2, 4, 8, 4, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, key_heads, 8, 4, generator=generator).to(dtype) for _ in range(2))
    index = torch.arange(8)
    columns = torch.stack([{ALL: index * 0, UP_TO: index, BEFORE: index + 1}[seen], index * 0])

    def both(word: int) -> list[Tensor]:
        """With a second block, all of which is seen: every query sees something."""
        places = torch.stack([index, index])
        blocks = Blocks([word, ALL], index, columns, places, 0.5)
        out, sums = context_parallel._forward(q, k, v, blocks, rt.comm.SingleGroup())
        found = context_parallel._backward(grad, q, k, v, out, sums, blocks, rt.comm.SingleGroup())
        return [out, sums, *found]

    kernel, compared = both(seen), both(COMPARED)
    monkeypatch.setattr(context_parallel, "_has_kernel", lambda *_: False)
    for one, other, third in zip(kernel, both(seen), compared, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, third)
