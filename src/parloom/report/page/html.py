"""The page of a report: one file with its data, its styles and its program inside."""

import base64
import gzip
import hashlib
import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from parloom.cost.units import format_bytes, format_seconds

ASSETS = files("parloom.report.page").joinpath("assets")


def page(document: dict[str, Any]) -> str:
    """The page that shows a document; it asks for nothing outside itself."""
    script, style = _asset("report.js"), _asset("report.css")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"seconds": format_seconds, "bytes": format_bytes}
    return environment.from_string(_asset("shell.html.jinja")).render(
        document=document,
        data=_packed(document),
        script=Markup(script),
        style=Markup(style),
        script_hash=_hash(script),
    )


def _asset(name: str) -> str:
    return ASSETS.joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names what may run."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _packed(document: dict[str, Any]) -> str:
    """JSON, compressed: letters that mean nothing to HTML."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
