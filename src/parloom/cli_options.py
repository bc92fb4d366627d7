"""The flags and arguments of the `parloom` command that several verbs share, or that are long."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from parloom.arguments import METHODS
from parloom.quantization import QUANTIZED
from parloom.search.pins import NO_REWRITE


class Dtype(StrEnum):
    """The floating-point type of parameters and activations."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP64 = "fp64"


Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Details, and tracebacks of errors.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="zoo:NAME, a Hugging Face config.json, folder or Hub id, pkg.module:factory, "
        "file.py:factory, or a .pt2 file.",
    ),
]
Method = Annotated[
    str, typer.Option(help=f"{', '.join(METHODS)}, or a plan file to take decisions from.")
]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory to use per device, as 70GB.")
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where to save; default: below runs/.")
]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file or its folder.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Global batch size.")]
Sequence = Annotated[int | None, typer.Option(min=1, help="Sequence length.")]
OptimizerName = Annotated[
    str | None, typer.Option(help="A class of torch.optim; default: the factory's, or adamw.")
]
Clusters = Annotated[
    str | None,
    typer.Option(
        metavar="C[,C..]", help="2x8xH100, 8xH100, 4xcpu, or a YAML file; default: this machine."
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(metavar="COUNT", help="Tokens of the whole run, as 2T, 300B or 1.5e12."),
]
Days = Annotated[
    float | None,
    typer.Option(metavar="N", min=0, help="The cheapest plan that trains --tokens in N days."),
]
Pareto = Annotated[
    bool, typer.Option("--pareto", help="All parts of all clusters: what is fast, what is cheap.")
]
Price = Annotated[
    str | None,
    typer.Option(
        metavar="USD/gpu-h",
        help="Dollars for an hour of a device: 2.10/gpu-h, or H100=2.10/gpu-h,A100=1.29/gpu-h.",
    ),
]
Inference = Annotated[
    bool, typer.Option("--inference", help="Plan forward passes alone: nothing is trained.")
]
NewTokens = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Generate N tokens after each prompt (--inference)."),
]
Allowed = Annotated[
    list[str] | None,
    typer.Option(metavar="WHAT", help=f"{QUANTIZED}: gradients and gathered weights in int8."),
]
Steps = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Denoising steps of an answer (--inference)."),
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="int8|fp8", help="How weights of products are stored (--inference)."),
]
OBJECTIVE = (
    "The fastest plan (default), the cheapest a step, or the least peak memory; of --inference the"
    " shortest answer (default), or the most in a second."
)
PIN = (
    "Only plans that hold this: layers.0=n:x (axis x splits factor n), NAME=replicated,"
    " NAME=weights:sharded, BLOCK=recompute, mesh=2x4 (docs/reference/pins.md); may be repeated."
)
FORBID = "No plan that holds this; written like --pin."
SEMANTICS = "The loss is that of the whole batch, or the mean over microbatches, each by itself."
DEVICES = "Use N of the cluster's devices; default: as many as are fastest."
NO_REWRITES = f"Compute all values as the model does; the same as --forbid '{NO_REWRITE}'."
BUDGET = (
    "End the search after WORK units: one for each program that is solved and each step that is"
    " simulated."
)
RESUME = "Go on from the last checkpoint, under a new plan where the devices are others."
CHECKPOINT = "A checkpoint, or the folder that has them, for --resume; default: the plan's folder."
THERE = "The devices that are there, for --resume; default: the plan's, or the GPUs that are left."
TO = (
    "A launcher: slurm, k8s, skypilot, ray, torchrun; a framework's settings: torchtitan,"
    " accelerate, deepspeed, megatron, dtensor; where ranks are: ranks, rankfile, jax; or"
    " model-explorer."
)
STRICT = "Exit 3, and write nothing, where a framework's settings cannot say all of the plan."
RUN = "As python would take it; of a plan for inference files of requests and of answers."
SCRIPT = "As python would take it; default: train.py."
TRACE = "Write the third step, as it ran and as it is simulated, for Perfetto."
TIMEOUT = "End the run where a rank waits so long for another one; default: 600."
GAP = "Exit 6 where the step is more than this share above its bound, as 0.2."
Calibrated = Annotated[
    Path | None, typer.Option(metavar="F", help="Measured rates, as `parloom calibrate` writes.")
]
Plans = Annotated[
    list[Path], typer.Argument(metavar="PLAN...", help="Plan files or their folders.")
]
RunLog = Annotated[
    Path | None, typer.Option("--run", metavar="LOG", help="The log of a run of the first plan.")
]
