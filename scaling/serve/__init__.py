"""Inference (Parts 7 and 8): caches, prefill and decode, sampling, the engine and what it is made of.

What stands here is loaded when it is first used, so that the scheduler and the simulator, which need no torch, can be
imported without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scaling.serve.sampling import Sampling

__all__ = ["Sampling"]

_HOMES = {  # module -> what of it stands here
    "scaling.serve.sampling": ("Sampling",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'scaling.serve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
