"""Text from the templates of this folder; what they are not given is an error."""

import shlex
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from parloom.errors import one_line

TEMPLATES = files("parloom.export").joinpath("templates")


def rendered(name: str, **values: Any) -> str:
    """The template of the file `name`, filled in."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quoted"] = shlex.quote
    environment.filters["literal"] = ascii
    environment.filters["comment"] = one_line
    text = TEMPLATES.joinpath(f"{name}.jinja").read_text(encoding="utf-8")
    return environment.from_string(text).render(**values)
