"""A file of requests through an inference plan."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parloom import api
from parloom import runtime as rt
from parloom.capture.fingerprint import fingerprint
from parloom.capture.generation import capture_generation
from parloom.capture.inference import capture_inference
from parloom.capture.load import Loaded
from parloom.errors import InputError
from parloom.execute.apart import together
from parloom.execute.inference import inference_programs
from parloom.execute.requests import check_requests, read_requests
from parloom.execute.serve import Answer, answers, write
from parloom.ir.plan import ONE_DEVICE, Decisions
from tests.dist.inference_plans import BATCH, PROMPT, plan_of_pass, served


def _file(folder: Path, *lines: str) -> Path:
    file = folder / "requests.jsonl"
    file.write_text("\n".join(lines))
    return file


def test_each_request_is_answered_as_it_would_be_alone(tmp_path: Path) -> None:
    """Six requests in batches of four; the rest of the last batch is filled up and dropped."""
    found = served("gpt2")
    plan = found.plan(Decisions(ONE_DEVICE))
    programs = inference_programs(plan)
    pipelines = {name: program.pipeline for name, program in programs.items()}
    comm = rt.SingleComm(programs["decode"].only.program.mesh)
    server = rt.Server(pipelines, found.tensors, comm)
    prompts = torch.randint(40, (BATCH + 2, PROMPT), generator=torch.Generator().manual_seed(1))
    file = _file(tmp_path, *(json.dumps({"input_ids": row.tolist()}) for row in prompts), "")
    requests = list(read_requests(file, found.made.prefill))
    made = list(answers(server, plan, found.made.prefill, requests))
    assert len(made) == BATCH + 2
    for row, answer in zip(prompts, made, strict=True):
        model: Any = found.model.eval()
        wanted = model.generate(
            row[None], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert answer["tokens"] == wanted[0, PROMPT:].tolist()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "requests.jsonl:1:2: not JSON"),
        ("[1]", "requests.jsonl:1: a request is an object with input_ids"),
        ('{"labels": [1]}', "a request is an object with input_ids"),
        ('{"input_ids": [1, 2]}', r"input_ids has shape \[2\], the plan: \[8\]"),
        (
            '{"input_ids": [1, 2, 3, 4, 5, 6, 7, 40]}',
            "input_ids has 40, and the table that it is a row of has 40",
        ),
        ('{"input_ids": [1, 2, 3, 4, 5, 6, 7, "a"]}', 'input_ids has "a", and takes whole numbers'),
        ('{"input_ids": [1, 2, 3, 4, 5, 6, 7, 1.5]}', "input_ids has 1.5, and takes whole numbers"),
        ('{"input_ids": [1, 2, 3, 4, 5, 6, 7, true]}', "has true, and takes whole numbers"),
        ('{"input_ids": [1, 2, 3, 4, 5, 6, 7, NaN]}', "requests.jsonl:1: cannot be read: NaN"),
        ('{"input_ids": [1], "input_ids": [2]}', "cannot be read: a name is given twice"),
        ('{"input_ids": [' + "9" * 5000 + "]}", "requests.jsonl:1: cannot be read: "),
        ("[" * 100_000, "requests.jsonl:1: cannot be read: "),
        ('{"input_ids": [[[1]], 2]}', "requests.jsonl:1: input_ids: "),
        ("", "requests.jsonl has no requests"),
    ],
)
def test_bad_requests_are_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(read_requests(_file(tmp_path, line), served("gpt2").made.prefill))


@pytest.mark.parametrize("number", ["1e39", "-1e400"])
def test_numbers_beyond_the_dtype_are_refused(tmp_path: Path, number: str) -> None:
    """They would be infinite, which JSON has no number for."""
    graph, _ = capture_inference(Loaded(nn.Linear(2, 2), {"input": torch.zeros(1, 2)}), 0)
    with pytest.raises(InputError, match="input has a number beyond those of float32"):
        list(read_requests(_file(tmp_path, f'{{"input": [0, {number}]}}'), graph))


def test_files_as_editors_write_them(tmp_path: Path) -> None:
    """A mark of the byte order, ends of lines of two characters, and lines without anything."""
    line = '{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]}'
    file = tmp_path / "requests.jsonl"
    file.write_bytes(f"\ufeff{line}\r\n\r\n{line}\r\n".encode())
    found = read_requests(file, served("gpt2").made.prefill)
    assert [request["input_ids"].tolist() for request in found] == [[*range(1, 9)]] * 2


def test_answers_have_a_place_of_their_own(tmp_path: Path) -> None:
    """Said before any rank is started."""
    plan = served("gpt2").plan(Decisions(ONE_DEVICE))
    file = _file(tmp_path, '{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]}')
    check_requests(plan, [str(file), str(tmp_path / "new" / "answers.jsonl")])
    (tmp_path / "half.partial").mkdir()
    wrong = {
        str(file): "is the file of requests",
        str(tmp_path): "it is a folder",
        str(tmp_path / "half"): "half.partial: it is a folder",
        str(file / "below"): "is not a folder",
        "--none": "unrecognized arguments",
        "--weights=none": "none is not there",
    }
    for given, said in wrong.items():
        with pytest.raises(InputError, match=said):
            check_requests(plan, [str(file), given])
    unlucky = file.rename(tmp_path / "answers.partial")
    with pytest.raises(InputError, match=r"answers.partial is the file of requests"):
        check_requests(plan, [str(unlucky), str(tmp_path / "answers")])


class _Outputs(nn.Module):
    """Names that programs of tokens have, too, and an output of one dim of samples and another."""

    def __init__(self, also: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.also, self.linear = also, nn.Linear(6, 5)

    def forward(self, generated: Tensor) -> dict[str, Tensor]:
        found = self.linear(generated)
        return {
            "tokens": found,
            "logits": found[:, None],
            "turned": found.t(),
            "flat": found.reshape(-1, 1),
            "also": self.also(found),
        }


def _answers(batch: Tensor, also: Callable[[Tensor], Tensor], folder: Path) -> list[Answer]:
    """Answers beside what the module makes of each sample alone."""
    model = _Outputs(also).eval()
    graph, _ = capture_inference(Loaded(model, {"generated": batch}), 0)
    plan = plan_of_pass(graph, Decisions(ONE_DEVICE))
    lines = (json.dumps({"generated": row.tolist()}) for row in batch)
    requests = list(read_requests(_file(folder, *lines), graph))
    pipelines = {name: program.pipeline for name, program in inference_programs(plan).items()}
    comm = rt.SingleComm(pipelines["forward"].programs[0].mesh)
    server = rt.Server(pipelines, dict(model.named_parameters()), comm)
    return list(answers(server, plan, graph, requests))


@pytest.mark.parametrize("size", [5, 3, 1])
def test_each_output_is_of_its_request(tmp_path: Path, size: int) -> None:
    torch.manual_seed(0)
    batch = torch.randn(size, 6)
    made = _answers(batch, lambda found: found.argmax(-1), tmp_path)
    torch.manual_seed(0)
    torch.randn(size, 6)
    model = _Outputs(lambda found: found.argmax(-1))
    for row, answer in zip(batch, made, strict=True):
        one = model.linear(row)
        assert answer["also"] == int(one.argmax())
        assert answer.keys() == {"tokens", "logits", "turned", "flat", "also"}
        for name, shape in {"tokens": [5], "logits": [1, 5], "flat": [5, 1]}.items():
            found = torch.tensor(answer[name])
            assert list(found.shape) == shape
            torch.testing.assert_close(found.flatten(), one)
        torch.testing.assert_close(torch.tensor(answer["turned"]).flatten(), one)


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    made = _answers(torch.ones(2, 6), lambda found: found / torch.zeros(()), tmp_path)
    file = io.StringIO()
    write(made, file)
    assert "NaN" not in file.getvalue()
    assert "Infinity" not in file.getvalue()
    for line, answer in zip(file.getvalue().splitlines(), made, strict=True):
        found = json.loads(line)
        assert found.pop("also") == [None] * 5
        assert found == {name: value for name, value in answer.items() if name != "also"}


@pytest.mark.parametrize(
    "also",
    [
        torch.mean,
        lambda found: found @ found.t(),
        lambda found: found @ found.t() @ found,
        lambda found: found - found.mean(0),
        lambda found: found / found.norm(),
        lambda found: found.softmax(0),
        lambda found: found.cumsum(0),
        lambda found: found.roll(1, 0),
        lambda found: nn.functional.batch_norm(found, None, None, training=True),
    ],
)
def test_outputs_of_several_requests_are_refused(
    tmp_path: Path, also: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(InputError, match="output 'also' is made of all requests of a batch"):
        _answers(torch.randn(4, 6), also, tmp_path)


def test_experts_answer_each_request_by_itself() -> None:
    """They send tokens to each other's ranks, and give each what it has alone."""
    graph = served("mixtral").made.prefill
    assert together(replace(graph, updates=())) == frozenset()


def test_a_batch_of_one_prompt(tmp_path: Path) -> None:
    found = served("gpt2")
    prompts = found.prompts[:1]
    made = capture_generation(found.model, {"input_ids": prompts}, 2)
    plan = replace(found, prompts=prompts, made=made).plan(Decisions(ONE_DEVICE))
    plan = replace(plan, inference=replace(plan.inference, new_tokens=2))  # type: ignore[type-var]
    file = _file(tmp_path, *(json.dumps({"input_ids": row.tolist()}) for row in found.prompts))
    requests = list(read_requests(file, made.prefill))
    pipelines = {name: program.pipeline for name, program in inference_programs(plan).items()}
    server = rt.Server(
        pipelines, found.tensors, rt.SingleComm(pipelines["decode"].programs[0].mesh)
    )
    model: Any = found.model.eval()
    wanted = model.generate(
        found.prompts, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    found_tokens = [answer["tokens"] for answer in answers(server, plan, made.prefill, requests)]
    assert found_tokens == wanted[:, PROMPT:].tolist()


def test_a_missing_file_and_flags_of_training(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read requests"):
        list(read_requests(tmp_path / "none", served("gpt2").made.prefill))
    found = served("gpt2")
    plan = replace(
        found.plan(Decisions(ONE_DEVICE)),
        fingerprint=fingerprint(found.model, found.loaded.batch),
    )
    paths = api.save(plan, tmp_path)
    assert "def forward" in paths["source"].read_text()
    assert api.load(tmp_path) == plan
    with pytest.raises(InputError, match="no requests"):
        api.run(tmp_path, [])
    with pytest.raises(InputError, match="--trace is of training steps"):
        api.run(tmp_path, ["requests.jsonl"], trace=tmp_path / "trace")
