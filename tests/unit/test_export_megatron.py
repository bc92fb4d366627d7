"""Megatron-LM's arguments read back: any configuration is said, and nothing is listed."""

import argparse
import subprocess
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from parloom.comparators.configuration import Configuration
from parloom.export import megatron
from parloom.export.description import describe
from tests.exported import BATCH, PLAIN, planned
from tests.megatron_flags import megatron_args


def zero_of(args: argparse.Namespace) -> int:
    levels = {None: 1, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    strategy = args.data_parallel_sharding_strategy
    return levels[strategy] if args.use_distributed_optimizer else 0


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    """Of 16 ranks: what `megatron` may propose for the GPT."""
    tensor = draw(st.sampled_from([1, 2, 4]))
    pipeline = draw(st.sampled_from([1, 2, 4]))
    chunks = draw(st.sampled_from([1, 2])) if pipeline == 2 else 1
    data = 16 // tensor // pipeline
    counts = [n for n in (1, 2, 4) if BATCH % (data * n) == 0 and (chunks == 1 or n % 2 == 0)]
    if not counts:
        chunks, counts = 1, [1]
    count = draw(st.sampled_from(counts))
    zero = draw(st.integers(0, 3)) if data > 1 else 0
    shards = [n for n in (0, 2, 4) if n < data and zero]
    return Configuration(
        tensor=tensor,
        pipeline=pipeline,
        interleave=chunks,
        data=data,
        zero=zero,
        shard=draw(st.sampled_from(shards or [0])),
        microbatch=BATCH // data // count,
        num_microbatches=count,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "full"])),
        master_dtype=None,
    )


@given(configurations())
@settings(max_examples=8)
def test_megatron_reads_back_the_configuration(chosen: Configuration) -> None:
    args, missing = megatron_args(planned(chosen))
    assert missing == ()
    assert args.tensor_model_parallel_size == chosen.tensor
    assert args.pipeline_model_parallel_size == chosen.pipeline
    assert (args.num_virtual_stages_per_pipeline_rank or 1) == chosen.interleave
    assert args.sequence_parallel == chosen.sequence_parallel
    assert zero_of(args) == chosen.zero
    shard = chosen.data // (args.num_distributed_optimizer_instances or 1)
    assert shard == (chosen.shard or chosen.data)
    assert args.micro_batch_size == chosen.microbatch
    assert args.global_batch_size == chosen.samples
    assert (args.recompute_granularity == "full") == (chosen.recompute == "full")


def test_the_script_is_of_bash(tmp_path: Path) -> None:
    """A shell that sources it has the arguments, and the connections that Megatron-LM asks for."""
    for zero, connections in ((1, "1"), (3, "")):
        found = megatron.settings(describe(planned(replace(PLAIN, zero=zero))))
        file = tmp_path / found.name
        file.write_text(found.text)
        script = f'source "{file}"; echo "$CUDA_DEVICE_MAX_CONNECTIONS" "${{PARALLEL_ARGS[@]}}"'
        command = ["bash", "-euc", f"CUDA_DEVICE_MAX_CONNECTIONS=; {script}"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        words = said.removeprefix(connections).split()
        assert words[:2] == ["--tensor-model-parallel-size", "2"]
        assert said.startswith(f"{connections} --")
