"""The files for other frameworks as their own parsers read them, each in a fork of its own.

`make parsers` installs them (tests/parsers.txt) where no other test sees them; without, these are
skipped.
"""

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parloom.comparators.configuration import Configuration
from parloom.export import accelerate, deepspeed, torchtitan
from parloom.export.description import Description, describe
from parloom.export.settings import Settings
from tests.exported import planned
from tests.forked import forked

PARSERS = Path(sys.prefix, "parsers")

CASES = {
    "data": Configuration(data=16, master_dtype=None),
    "zero1": Configuration(data=16, zero=1, recompute="full", master_dtype=None),
    "zero2": Configuration(data=8, microbatch=1, num_microbatches=2, zero=2, master_dtype=None),
    "fsdp": Configuration(data=16, zero=3, shard=8, recompute="selective", master_dtype=None),
    "tensor": Configuration(
        tensor=2, data=8, microbatch=2, zero=3, sequence_parallel=True, master_dtype=None
    ),
    "context": Configuration(tensor=2, context=2, data=4, microbatch=4, zero=3, master_dtype=None),
    "pipeline": Configuration(
        pipeline=2, tensor=2, data=4, microbatch=2, num_microbatches=2, master_dtype=None
    ),
}

TORCHTITAN = """
from types import SimpleNamespace
from torchtitan.config import ParallelismConfig, TrainingConfig
names = {}
exec(compile(open(path).read(), path, "exec"), names)
config = names["settings"](SimpleNamespace(training=TrainingConfig()))
assert isinstance(config.parallelism, ParallelismConfig)
own = config.parallelism
found = {
    "degrees": [own.data_parallel_replicate_degree, own.data_parallel_shard_degree,
                own.context_parallel_degree, own.tensor_parallel_degree,
                own.pipeline_parallel_degree],
    "batch": config.training.global_batch_size,
    "recompute": type(config.activation_checkpoint).__qualname__,
}
"""
ACCELERATE = """
import os
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.launch import prepare_multi_gpu_env
from accelerate.utils import prepare_deepspeed_cmd_env, prepare_simple_launcher_cmd_env
args = launch_command_parser().parse_args(["--config_file", path, "train.py"])
args, _, _ = _validate_launch_command(args)
found = {"kind": [bool(args.use_fsdp), bool(args.use_deepspeed), bool(args.multi_gpu)],
         "processes": args.num_processes}
if args.use_fsdp:
    os.environ.update({k: v for k, v in prepare_multi_gpu_env(args).items()
                       if k.startswith(("FSDP", "PARALLELISM"))})
    from accelerate.utils import FullyShardedDataParallelPlugin
    own, plugin = ParallelismConfig(), FullyShardedDataParallelPlugin()
    assert own.total_size == args.num_processes
    found["degrees"] = [own.dp_replicate_size, own.dp_shard_size, own.cp_size, own.tp_size]
    found["reshard"] = plugin.reshard_after_forward
    found["recompute"] = plugin.activation_checkpointing
"""
DEEPSPEED = """
from types import SimpleNamespace
from deepspeed.runtime import config
config.dist.get_rank = lambda: 0
mpu = SimpleNamespace(get_data_parallel_world_size=lambda: data)
own = config.DeepSpeedConfig(path, mpu=mpu)
found = {"zero": int(own.zero_optimization_stage), "micro": own.train_micro_batch_size_per_gpu,
         "steps": own.gradient_accumulation_steps, "batch": own.train_batch_size,
         "tensor": own.tensor_parallel_config.autotp_size,
         "hpz": own.zero_config.zero_hpz_partition_size}
"""


@pytest.fixture(scope="module")
def described() -> dict[str, Description]:
    return {name: describe(planned(chosen)) for name, chosen in CASES.items()}


def read(
    package: str,
    code: str,
    settings: Callable[[Description], Settings],
    described: dict[str, Description],
    folder: Path,
) -> dict[str, Any]:
    """What the parser of `package` makes of the file of each case; raises `ValueError`."""
    if not (PARSERS / package).is_dir():
        pytest.skip(f"{package} is not installed: make parsers")
    paths = {}
    for name, found in described.items():
        own = settings(found)
        paths[name] = folder / f"{name}-{own.name}"
        paths[name].write_text(own.text)

    def parse() -> int:
        warnings.simplefilter("ignore")
        logging.disable()
        sys.path.append(str(PARSERS))
        os.environ["DS_ACCELERATOR"] = "cpu"
        read_one = compile(code, package, "exec")
        answers = {}
        for name, path in paths.items():
            names: dict[str, Any] = {"path": str(path), "data": described[name].chosen.data}
            try:
                exec(read_one, names)
            except Exception:
                traceback.print_exc(file=sys.stdout)
                return 1
            answers[name] = names["found"]
        print("FOUND", json.dumps(answers))
        return 0

    code_of_exit, said = forked(parse, 120)
    if code_of_exit != 0:
        raise ValueError(said)
    line = next(line for line in said.splitlines() if line.startswith("FOUND "))
    found_all: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found_all


def test_torchtitan(described: dict[str, Description], tmp_path: Path) -> None:
    found = read("torchtitan", TORCHTITAN, torchtitan.settings, described, tmp_path)
    degrees = {name: own["degrees"] for name, own in found.items()}
    assert degrees == {
        "data": [16, 1, 1, 1, 1],
        "zero1": [1, 16, 1, 1, 1],
        "zero2": [1, 8, 1, 1, 1],
        "fsdp": [2, 8, 1, 1, 1],
        "tensor": [1, 8, 1, 2, 1],
        "context": [1, 4, 2, 2, 1],
        "pipeline": [4, 1, 1, 2, 2],
    }
    assert {own["batch"] for own in found.values()} == {16}
    assert found["zero1"]["recompute"] == "FullAC.Config"
    assert found["fsdp"]["recompute"] == "SelectiveAC.Config"
    assert found["data"]["recompute"] == "NoneType"


def test_accelerate(described: dict[str, Description], tmp_path: Path) -> None:
    found = read("accelerate", ACCELERATE, accelerate.settings, described, tmp_path)
    fsdp, plugin, plain = [True, False, False], [False, True, False], [False, False, True]
    kinds = {name: own["kind"] for name, own in found.items()}
    assert kinds == {
        "data": plain, "zero1": plugin, "zero2": fsdp, "fsdp": fsdp, "tensor": fsdp,
        "context": fsdp, "pipeline": fsdp,
    }  # fmt: skip
    assert found["fsdp"]["degrees"] == [2, 8, 1, 1]
    assert found["tensor"]["degrees"] == [1, 8, 1, 2]
    assert found["context"]["degrees"] == [1, 4, 2, 2]
    assert found["fsdp"]["reshard"]
    assert not found["zero2"]["reshard"]
    assert {name: own["processes"] for name, own in found.items() if own["processes"] != 16} == {
        "zero2": 8,
        "pipeline": 8,
    }


def test_deepspeed(described: dict[str, Description], tmp_path: Path) -> None:
    found = read("deepspeed", DEEPSPEED, deepspeed.settings, described, tmp_path)
    zero = {"data": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "tensor": 3, "context": 3, "pipeline": 0}
    assert {name: own["zero"] for name, own in found.items()} == zero
    assert {own["batch"] for own in found.values()} == {16}
    assert found["fsdp"]["hpz"] == 8
    assert found["tensor"]["tensor"] == 2
    assert (found["zero2"]["micro"], found["zero2"]["steps"]) == (1, 2)


def test_a_wrong_file_is_refused(described: dict[str, Description], tmp_path: Path) -> None:
    """The parser sees what it is given."""

    def wrong(found: Description) -> Settings:
        own = deepspeed.settings(found)
        document = json.loads(own.text)
        return Settings(own.name, json.dumps(document | {"zero_optimization": {"stag": 3}}))

    with pytest.raises(ValueError, match="stag"):
        read("deepspeed", DEEPSPEED, wrong, {"data": described["data"]}, tmp_path)
