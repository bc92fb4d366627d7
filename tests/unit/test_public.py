"""What `import parloom` offers, and what it does not load."""

import subprocess
import sys
from typing import Any

import pytest

import parloom
from parloom.errors import InfeasibleError, InputError


def test_importing_loads_neither_torch_nor_the_compiler() -> None:
    code = (
        "import sys, parloom\n"
        "assert parloom.__version__ and 'plan' in dir(parloom)\n"
        "assert not {'torch', 'parloom.api', 'parloom.ir'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_verbs_are_those_of_the_api() -> None:
    from parloom import api

    for name in parloom.__all__:
        assert getattr(parloom, name) is getattr(api, name)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"batch": 0}, "batch: must be a whole number from 1 on, got 0"),
        ({"seq": 2.5}, "seq: must be a whole number from 1 on, got 2.5"),
        ({"microbatches": 0}, "microbatches: must be"),
        ({"microbatches": True}, "microbatches: must be"),
        ({"seed": -1}, "seed: must be a whole number from 0 on, got -1"),
        ({"dtype": "fp17"}, "no dtype 'fp17'; did you mean"),
        ({"method": "megatorn"}, "no method or plan file 'megatorn'; did you mean 'megatron'"),
        ({"memory": "70Gb"}, "memory: '70Gb' is ambiguous"),
        ({"memory": 0}, "memory: must be greater than zero"),
        ({"memory": 1.5}, "memory: must be bytes or text such as 70GB"),
        ({"model": print}, "factory builtins:print returned a NoneType"),
        ({"model": 7}, "the model is a int: give a module with its batch"),
    ],
)
def test_keyword_arguments_are_checked_as_flags_are(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parloom.plan(**({"model": "zoo:mlp", "cluster": "2xcpu"} | asked))


def test_memory_is_bytes_or_text() -> None:
    small = {"cluster": "2xcpu", "method": "fsdp", "batch": 4}
    assert parloom.plan("zoo:mlp", **small, memory="1GB").decisions  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError):
        parloom.plan("zoo:mlp", **small, memory="1MB")  # type: ignore[arg-type]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'parloom' has no attribute 'solve'"):
        parloom.solve  # type: ignore[attr-defined]  # noqa: B018
