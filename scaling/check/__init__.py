"""The judge: the types of every line of a program, found by running it on an abstract mesh, where nothing is sent.

`python -m scaling.check FILE...`; `scaling.check.judge` for programs and notebooks.
"""

from scaling.check.files import check_source, files_of, main
from scaling.check.lines import Finding, check_lines
from scaling.check.rules import RULES

__all__ = ["RULES", "Finding", "check_lines", "check_source", "files_of", "main"]
