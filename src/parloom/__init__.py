"""parloom: finds, proves, predicts and runs parallel training plans for PyTorch models.

The verbs of `parloom.api` are here too. They are imported when first asked for, so that
`import parloom` loads neither torch nor the compiler.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "plan",
    "save",
    "load",
    "generate",
    "verify",
    "run",
    "parallelize",
    "load_cluster",
    "show_sharding",
]

if TYPE_CHECKING:
    from parloom.api import (
        generate,
        load,
        load_cluster,
        parallelize,
        plan,
        run,
        save,
        show_sharding,
        verify,
    )
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("parloom.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
