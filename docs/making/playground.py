"""What the playground loads: Pyodide, which is Python in the browser, and the project's own wheel.

Pyodide is the npm package of that name, without its maps and types; the wheel is built from this checkout.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PYODIDE = "pyodide@314.0.7"
PARTS = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")


def prepare(root: Path) -> None:
    """Put both into docs/static/pyodide: Pyodide if it is not there, the wheel each time."""
    out = root / "docs" / "static" / "pyodide"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if not all((out / part).exists() for part in PARTS) and not _fetch(Path(folder), out):
            print("left out: the playground has no Python; npm, or what it fetches from, cannot be reached")
        _wheel(root, Path(folder), out / "scaling.whl")


def _fetch(folder: Path, out: Path) -> bool:
    """Whether Pyodide could be had."""
    npm = shutil.which("npm")
    if not npm or subprocess.run([npm, "pack", "--silent", PYODIDE], cwd=folder, capture_output=True).returncode:
        return False
    shutil.unpack_archive(next(folder.glob("pyodide-*.tgz")), folder)
    for part in PARTS:
        shutil.copy(folder / "package" / part, out / part)
    return True


def _wheel(root: Path, folder: Path, wheel: Path) -> None:
    """The wheel of a copy: a build leaves folders, and takes old ones in."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, folder / name)
    shutil.copytree(root / "scaling", folder / "scaling", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "made", "."]
    subprocess.run(command, cwd=folder, check=True)
    shutil.move(next((folder / "made").glob("*.whl")), wheel)
