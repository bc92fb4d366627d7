"""Passes of a pipeline that generates: a stage begins the next token while others are not there."""

from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from parloom import runtime as rt
from parloom.capture import parameters_of
from parloom.execute.inference import inference_programs, verify_inference
from parloom.execute.ranks import RankError, fork_ranks
from parloom.execute.requests import Request
from parloom.execute.serve import Answer, answers
from parloom.ir.graph import Graph
from parloom.ir.plan import ONE_DEVICE, Decisions, Plan
from parloom.runtime.batches import Batches
from parloom.runtime.generation import DECODE, FORWARD
from parloom.runtime.part import Part
from parloom.runtime.passes import forward_pass
from parloom.runtime.program import Action
from parloom.runtime.told import Awaiting, Telling
from tests.dist.inference_plans import (
    BATCH,
    PROMPT,
    four_stages,
    passed,
    plan_of_pass,
    served,
    two_stages,
)

Tensors = Mapping[str, Tensor]
Wrong = Callable[[pytest.MonkeyPatch], None]


def _plan(name: str, stages: int, microbatches: int) -> Plan:
    graph = served(name).made.decode
    if stages == 2:
        return served(name).plan(two_stages(graph, Decisions(ONE_DEVICE), microbatches))
    return served(name).plan(four_stages(graph, microbatches))


@pytest.mark.parametrize(
    ("name", "stages", "microbatches"),
    [("gpt2", 2, 1), ("gpt2", 2, 4), ("llama", 4, 4), ("t5", 4, 4)],
)
def test_logits_and_caches_are_those_of_one_device(
    name: str, stages: int, microbatches: int
) -> None:
    """More and fewer microbatches than stages; none that overlap where there is one."""
    found = served(name)
    report = verify_inference(_plan(name, stages, microbatches), found.tensors, found.loaded.batch)
    assert report.passed, report
    assert report.num_ranks == stages


def _server(plan: Plan, tensors: Tensors) -> rt.Server:
    torch.set_num_threads(1)
    programs = {name: own.pipeline for name, own in inference_programs(plan).items()}
    return rt.Server(programs, tensors, rt.DistributedComm(programs[DECODE].mesh))


def _held_back(
    plan: Plan, tensors: Tensors, prompts: Tensor, begun: Event, timeout_s: float
) -> Tensor:
    """The last stage is not over with the first token before the first one is at the second."""
    server, passes = _server(plan, tensors), list[Action]()

    def watched(part: Part, program: rt.Program, action: Action, *rest: object) -> object:
        passes.append(action)
        if action.stage == 0 and len(passes) == 3:
            begun.set()
        if action.stage == 1 and len(passes) == 2 and not begun.wait(timeout_s):
            raise TimeoutError("the next token was not begun")
        return forward_pass(part, program, action, *rest)  # type: ignore[arg-type]

    with patch("parloom.runtime.evaluation.forward_pass", watched):
        return server.generate(prompts, 3)[0]


def test_the_next_token_begins_before_the_last_one_is_over() -> None:
    """Two stages and two microbatches: the last stage waits in its second pass for the first one's
    third.
    """
    found = served("gpt2")
    plan = _plan("gpt2", 2, 2)
    begun = get_context("fork").Event()
    made = fork_ranks(2, _held_back, plan, found.tensors, found.prompts, begun, 30.0)
    assert torch.equal(made[0], made[1])


def test_one_microbatch_has_nothing_to_overlap() -> None:
    """The same wait never ends: it is what tells that passes overlap."""
    found = served("gpt2")
    begun = get_context("fork").Event()
    with pytest.raises(RankError, match="the next token was not begun"):
        fork_ranks(2, _held_back, _plan("gpt2", 2, 1), found.tensors, found.prompts, begun, 1.0)


def _of_another_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Telling.tell

    def tell(self: Telling, outputs: Tensors, comm: rt.Comm, microbatch: int) -> None:
        right(self, {name: value.flip(0) for name, value in outputs.items()}, comm, microbatch)

    monkeypatch.setattr(Telling, "tell", tell)


def _of_another_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def microbatch(self: Awaiting, index: int) -> dict[str, Tensor]:
        if self._made is None:
            return Batches.microbatch(self, index)
        self._made.whole()
        return Batches.microbatch(self, self._count - 1 - index)

    monkeypatch.setattr(Awaiting, "microbatch", microbatch)


@pytest.mark.parametrize("wrong", [_of_another_sample, _of_another_microbatch])
def test_tokens_of_others_fail(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof sees tokens that belong to other samples."""
    found = served("gpt2")
    wrong(monkeypatch)
    report = verify_inference(_plan("gpt2", 2, 2), found.tensors, found.loaded.batch)
    assert not report.passed
    assert "logits of token" in str(report.first_difference)


def _answer(plan: Plan, tensors: Tensors, graph: Graph, requests: list[Request]) -> list[Answer]:
    return list(answers(_server(plan, tensors), plan, graph, requests))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 1)])
def test_several_batches_are_under_way(stages: int, microbatches: int) -> None:
    """Every rank answers each request as the module does, whichever batch it is in."""
    found = served("gpt2")
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, 40, (4 * BATCH + 1, PROMPT), generator=generator)
    requests = [{"input_ids": row} for row in prompts]
    plan = _plan("gpt2", stages, microbatches)
    made = fork_ranks(stages, _answer, plan, found.tensors, found.made.prefill, requests)
    model: Any = found.model.eval()
    wanted = model.generate(
        prompts, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for own in made:
        assert [answer["tokens"] for answer in own] == wanted[:, PROMPT:].tolist()


def _passed(plan: Plan, tensors: Tensors, graph: Graph, requests: list[Request]) -> list[Answer]:
    torch.set_num_threads(1)
    programs = {name: own.pipeline for name, own in inference_programs(plan).items()}
    server = rt.Server(programs, tensors, rt.DistributedComm(programs[FORWARD].mesh))
    return list(answers(server, plan, graph, requests))


def test_several_batches_of_one_pass_are_under_way() -> None:
    """Images: the first stage begins a batch while the last one is at that before it."""
    loaded, graph = passed("vit")
    tensors = {n: t.detach() for n, t in parameters_of(loaded.model, graph).items()}
    images = torch.rand(3 * BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    requests = [{"pixel_values": image.double()} for image in images]
    plan = plan_of_pass(graph, four_stages(graph, 2))
    with torch.no_grad():
        wanted = loaded.model(pixel_values=images.double()).logits
    for own in fork_ranks(4, _passed, plan, tensors, graph, requests):
        found = torch.tensor([answer["logits"] for answer in own], dtype=torch.float64)
        torch.testing.assert_close(found, wanted)
