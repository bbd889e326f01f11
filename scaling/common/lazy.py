"""Packages that load their names at first use, so that importing such a package takes no time and no torch.

`needing` names the extra of this package that brings a library which is not installed.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def lazy(package: str, homes: Mapping[str, Iterable[str]], rooms: Iterable[str] = ()) -> tuple[Callable, Callable]:
    """Return the `__getattr__` and `__dir__` of a package.

    Args:
        package: the package's name.
        homes: for each module, the names of it that the package offers.
        rooms: names of the package's own modules, used where `homes` lacks the name.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in home_of:
            found = getattr(importlib.import_module(home_of[name]), name)
            setattr(sys.modules[package], name, found)  # the next access does not come here
            return found
        if name in rooms:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *rooms})

    return get, listed


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Turn an ImportError of the block into a ValueError that says which library `what` needs, and how to get it."""
    try:
        yield
    except ImportError as error:
        fix = f"pip install 'scaling-book-torch[{extra}]'"
        raise ValueError(f"{what} needs the library {error.name}\n  fix: {fix}") from None
