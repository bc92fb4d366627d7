"""A file of requests through an inference plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parloom import api
from parloom import runtime as rt
from parloom.capture.fingerprint import fingerprint
from parloom.errors import InputError
from parloom.execute.inference import inference_programs
from parloom.execute.serve import answers, read_requests
from parloom.ir.plan import ONE_DEVICE, Decisions
from tests.dist.inference_plans import BATCH, PROMPT, served


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
        ('{"input_ids": [1, 2, 3, 4, 5, 6, 7, 40]}', "input_ids has 40, and there are 40 tokens"),
        ('{"input_ids": [1, 2, 3, 4, 5, 6, 7, "a"]}', "requests.jsonl:1: input_ids: "),
        ("", "requests.jsonl has no requests"),
    ],
)
def test_bad_requests_are_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(read_requests(_file(tmp_path, line), served("gpt2").made.prefill))


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
