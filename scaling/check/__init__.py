"""The judge: it finds the types of every line of a program by running it on an abstract mesh, where nothing is sent.

`python -m scaling.check FILE...`; in programs and notebooks `judge(fn, *types, mesh=...)`, `with judged(mesh, ...)`.

    files       the command: each literal line alone, then the files that are run, and the report
    run         run a file once on abstract meshes, and the functions that it does not call itself
    contracts   the types that docstrings and comments declare, made part of the program
    watched     `judge` and `judged`
    mode        the Judge, who sees every op of torch; `typed` is the part of it that sees typed lines
    known       the Judge's memory: the type of each array; `held` is such a type, and says which rule it breaks
    inferred    the types of an op's results, by the law of `scaling.algebra`, which `results` asks
    strategy    judge a strategy, and compare its backward with its forward; `programs` are the library's own programs
    findings    the rules by name, and the places of findings
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
