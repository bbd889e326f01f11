"""The judge: it finds the types of every line of a program by running it on an abstract mesh, where nothing is sent.

`python -m scaling.check FILE...`; in programs and notebooks `judge(fn, *types, mesh=...)`, `with judged(mesh, ...)`.
"""

from typing import TYPE_CHECKING

from scaling.check.files import check_lines, check_source, files_of, main
from scaling.check.findings import RULES, Finding
from scaling.common.lazy import lazy

if TYPE_CHECKING:
    from scaling.check.watched import judge, judged

HOMES = {"scaling.check.watched": ("judge", "judged")}  # these need torch
__getattr__, __dir__ = lazy(__name__, HOMES)
__all__ = ["RULES", "Finding", "check_lines", "check_source", "files_of", "judge", "judged", "main"]
