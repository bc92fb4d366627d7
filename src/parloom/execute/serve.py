"""A file of requests through an inference plan: what every rank of `parloom run PLAN -- FILE` runs.

Requests and answers are JSON lines in the same order (`execute.requests`): `{"input_ids": [...]}`
with as many tokens as the plan's prompts have, and `{"tokens": [...]}`, or, for a plan of one pass,
objects of inputs and outputs. The last batch is filled up with its last request, whose answers are
dropped. A file of answers is there when all of them are; until then it is `NAME.partial`.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch

from parloom.capture import load_model
from parloom.capture.fingerprint import fingerprint
from parloom.capture.load import sizes_of
from parloom.capture.quantized import stored_values, without_scales
from parloom.cost.units import format_seconds
from parloom.errors import FingerprintError
from parloom.execute.files import read_plan
from parloom.execute.inference import inference_programs
from parloom.execute.requests import (
    Request,
    arguments,
    batch_size,
    of_sample,
    output_samples,
    partial_of,
    prompts_of,
    read_requests,
)
from parloom.execute.train import comm_of, device_of, join_ranks, values_of
from parloom.execute.watch import watcher
from parloom.ir.graph import Graph
from parloom.ir.plan import Plan
from parloom.ir.text import parse_graph
from parloom.runtime import Server
from parloom.runtime.generation import CHOSEN, FORWARD, TOKENS, Passes

Answer = Mapping[str, Any]


def main(argv: Sequence[str]) -> None:
    """Answer the requests of a file."""
    asked, plan = arguments(argv), read_plan(Path(os.environ["PARLOOM_PLAN"]))
    graph = prompts_of(plan)
    requests = list(read_requests(asked.requests, graph))
    server = server_of(plan, asked.weights)
    lines, began = answers(server, plan, graph, requests), time.monotonic()
    if server.comm.rank:
        for _ in lines:
            pass
        return
    if asked.answers is None:
        write(lines, sys.stdout)
    else:
        asked.answers.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_of(asked.answers)
        with partial.open("w", encoding="utf-8") as file:
            write(lines, file)
        partial.replace(asked.answers)
    took = format_seconds(time.monotonic() - began)
    print(f"{len(requests)} answered in {took}, without loading the model", file=sys.stderr)
    if asked.weights is None and sizes_of(plan.source.spec) is not None:
        new = f"the weights are new, drawn with seed {plan.seed}"
        print(f"{new}: --weights FILES gives those of a checkpoint", file=sys.stderr)


def server_of(plan: Plan, stored: Path | None) -> Server:
    """This rank's part of the plan's programs, with the model's weights or those that are stored.

    Raises `FingerprintError` where the model is not the one that was planned.
    """
    device, source = device_of(plan), plan.source
    if plan.decisions.num_ranks > 1:
        join_ranks(plan, device)
    loaded = load_model(
        source.spec, batch=source.batch, seq=source.seq, dtype=source.dtype, seed=plan.seed
    )
    if fingerprint(loaded.model, loaded.batch) != plan.fingerprint:
        raise FingerprintError(f"the plan was made for another model than {source.spec} is now")
    programs = {name: found.pipeline for name, found in inference_programs(plan).items()}
    comm = comm_of(next(iter(programs.values())).mesh, None, watcher())
    graph = parse_graph(plan.graph)
    own = values_of(loaded.model, without_scales(graph), stored)
    return Server(programs, stored_values((graph, prompts_of(plan)), own), comm, device)


def answers(
    server: Server, plan: Plan, graph: Graph, requests: Sequence[Request]
) -> Iterator[Answer]:
    """The answers to all requests, in order; every rank makes them."""
    assert plan.inference is not None, "a plan for inference"
    tokens, size = plan.inference.new_tokens, batch_size(graph)
    dims = {CHOSEN: 0} if tokens else output_samples(graph)
    waiting = iter(requests)
    under_way: deque[tuple[int, Passes]] = deque()

    def answered(count: int, passes: Passes) -> Iterator[Answer]:
        """The answers to the first requests of a batch."""
        found = passes.wait()
        outputs = {CHOSEN: torch.cat([told[CHOSEN] for told in found], 1)} if tokens else found[0]
        for index in range(count):
            samples = ((n, of_sample(v, dims[n], index, size)) for n, v in outputs.items())
            yield {name: value.tolist() for name, value in samples}

    while batch := list(islice(waiting, size)):
        filled = [*batch, *[batch[-1]] * (size - len(batch))]
        tensors = {name: torch.stack([request[name] for request in filled]) for name in batch[0]}
        if tokens:
            passes = server.begin_tokens(tensors[TOKENS], tokens)
        else:
            passes = server.begin(FORWARD, tensors)
        under_way.append((len(batch), passes))
        # The first stages begin the next batch while the last ones are at this one.
        if len(under_way) >= server.most_under_way:
            yield from answered(*under_way.popleft())
    for one in under_way:
        yield from answered(*one)


def write(lines: Iterable[Answer], file: TextIO) -> None:
    """Write answers as JSON lines."""
    for line in lines:
        print(_json(line), file=file, flush=True)


def _json(answer: Answer) -> str:
    """An answer as JSON, which has no numbers but finite ones: others are null."""
    try:
        return json.dumps(answer, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(answer), parse_constant=lambda name: None))


if __name__ == "__main__":
    main(sys.argv[1:])
