"""What `import parloom` offers, and what it does not load."""

import subprocess
import sys

import pytest

import parloom


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


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'parloom' has no attribute 'solve'"):
        parloom.solve  # type: ignore[attr-defined]  # noqa: B018
