"""Packages whose names are loaded when they are first used: to import such a package takes no time and no torch."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, Iterable[str]], rooms: Iterable[str] = ()) -> tuple[Callable, Callable]:
    """The `__getattr__` and `__dir__` of a package. `homes`: module -> what of it stands in the package; `rooms`: names
    which, where no module has them, are the package's own modules."""
    home_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in home_of:
            found = getattr(importlib.import_module(home_of[name]), name)
            setattr(sys.modules[package], name, found)  # so that nobody asks again
            return found
        if name in rooms:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *rooms})

    return get, listed
