"""Keep results of slow pure functions on disk, for as long as no source of this package changes."""

import contextlib
import hashlib
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache, wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

Pure = TypeVar("Pure", bound=Callable[..., Any])
KEPT = 4  # the number of versions of the sources whose results stay on disk


def on_disk(function: Pure) -> Pure:
    """Decorate a pure function so that its results are kept on disk, each under the repr of its arguments.

    The folder is $SCALING_CACHE, by default ~/.cache/scaling; an empty SCALING_CACHE keeps nothing. If the
    folder cannot be read or written, the function is simply called.
    """

    @wraps(function)
    def kept(*args: Any) -> Any:
        if (folder := results_folder()) is None:
            return function(*args)
        name = hashlib.sha256(f"{function.__module__}.{function.__name__}{args!r}".encode()).hexdigest()
        file = folder / f"{name[:32]}.pickle"
        with contextlib.suppress(Exception):  # a missing or damaged file, which can raise anything, is written anew
            return pickle.loads(file.read_bytes())
        result = function(*args)
        with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
            part.write(pickle.dumps(result))
            part.close()
            os.replace(part.name, file)  # in one step, because other processes may write the same result
        return result

    return kept  # type: ignore[return-value]


def results_folder() -> Path | None:
    """Return the folder for the results of the present sources, created if needed; None if it cannot be created."""
    root = os.environ.get("SCALING_CACHE", str(Path.home() / ".cache" / "scaling"))
    folder = Path(root) / f"sources-{digest_of_sources()}"
    try:
        if root and not folder.is_dir():
            folder.mkdir(parents=True)
            own = [path for path in Path(root).iterdir() if re.fullmatch(r"sources-[0-9a-f]{32}", path.name)]
            for each in sorted(own, key=lambda path: path.stat().st_mtime)[:-KEPT]:
                shutil.rmtree(each, ignore_errors=True)
    except OSError:
        return None
    return folder if root else None


@cache
def digest_of_sources() -> str:
    """Return a digest of all sources of this package, and of the versions that the results depend on."""
    found = hashlib.sha256(f"{sys.version_info[:2]} {version('torch')}".encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:32]
