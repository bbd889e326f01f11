"""The judge: the types of every line of a program, found by running it on an abstract mesh, where nothing is sent.

`python -m scaling.check FILE...`; in programs and notebooks `judge(fn, *types, mesh=...)`, `with judged(mesh, ...)`.
"""

from typing import TYPE_CHECKING

from scaling.check.files import check_source, files_of, main
from scaling.check.lines import Finding, check_lines
from scaling.check.rules import RULES
from scaling.lazy import lazy

if TYPE_CHECKING:
    from scaling.check.watched import judge, judged

__getattr__, __dir__ = lazy(__name__, {"scaling.check.watched": ("judge", "judged")})  # which need torch
__all__ = ["RULES", "Finding", "check_lines", "check_source", "files_of", "judge", "judged", "main"]
