"""Judge an answer in a separate process, which is ended after a minute with everything that it started."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scaling.exercise.page import name_in

SECONDS = 60


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, and the judge's message."""

    right: bool
    message: str

    def __str__(self) -> str:
        return ("right: " if self.right else "not yet: ") + self.message


def grade(answer: "str | Path", seconds: float = SECONDS) -> Verdict:
    """Return the judge's verdict on an answer, a file or its text. Raise a ValueError if it names no exercise."""
    if "\n" in str(answer):
        text = str(answer)
    elif Path(answer).is_file():
        text = Path(answer).read_text(encoding="utf-8")
    else:
        raise ValueError(f"there is no file {answer}\n  fix: write one by `new`, and fill it in")
    name = name_in(text)
    with tempfile.TemporaryDirectory() as folder:
        file, result = Path(folder) / f"{name}.py", Path(folder) / "verdict.json"
        file.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "scaling.exercise.judge", name, str(file), str(result)]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, complaint = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Verdict(
                False, f"it did not end within {seconds:.0f} s\n  fix: look for a loop or a wait that has no end"
            )
        finally:
            _end(process)
        if not result.exists():
            last = (complaint.strip().splitlines() or ["it said nothing"])[-1]
            return Verdict(False, f"its process ended with {process.returncode} before it was judged: {last}")
        return Verdict(**json.loads(result.read_text()))


def _end(process: subprocess.Popen) -> None:
    """End a process and everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
