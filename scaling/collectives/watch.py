"""The one place where a typed call can be seen before it runs: by the judge of types (`scaling.check`)."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

watcher: ContextVar[Callable[..., Any] | None] = ContextVar("watcher", default=None)  # called as (call, *arguments)


def who_watches() -> Callable[..., Any] | None:
    """What watches here; nobody while a compiler traces, which cannot follow a context variable."""
    return None if torch.compiler.is_compiling() else watcher.get()
