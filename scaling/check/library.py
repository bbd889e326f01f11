"""The library judged by its own programs, which no chapter needs that judges itself."""

from scaling.check.contracts import telling
from scaling.check.findings import Judgement
from scaling.check.mode import Judge
from scaling.check.run import attempt, nothing_outside
from scaling.check.watched import watching
from scaling.mesh import AbstractMesh


def judge_library() -> Judgement:
    """Every program of `programs`, each on its mesh; what its listings say of their types is a part of them."""
    report = Judgement()
    with telling(), nothing_outside("scaling", 0):
        from scaling.check.programs import programs

        for name, sizes, run in programs():
            judge = Judge(report, sizes)
            with watching(judge), attempt(judge, name):
                run(AbstractMesh(sizes))
    return report
