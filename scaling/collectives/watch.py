"""The one place where a typed call can be seen before it runs: by the judge of types (`scaling.check`)."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

watcher: ContextVar[Callable[..., Any] | None] = ContextVar("watcher", default=None)  # called as (call, *arguments)
