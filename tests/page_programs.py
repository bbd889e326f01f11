"""Runs the programs on a page: `python tests/page_programs.py docs/your-own-code.md`, each by itself.

With --in-turn those of bash too, one after the other in one folder, which has a text.txt, and with --short a quarter of
the steps of each training.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
INDEX = "pip download"  # a program that needs the package index: where that cannot be reached, the page is left out


def run(page: str, in_turn: bool, short: bool) -> str:
    """Run the programs of Python, in turn those of bash too; what happened."""
    languages = "bash|python" if in_turn else "python"
    programs = re.findall(rf"^```({languages})\n(.*?)^```", Path(page).read_text(), re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(ROOT / "README.md", Path(folder) / "text.txt")
        places = os.environ | {"XDG_CACHE_HOME": folder, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        for number, (language, program) in enumerate(programs, 1):
            if short:
                program = re.sub(r"--steps (\d+)", lambda steps: f"--steps {int(steps[1]) // 4}", program)
            (file := Path(folder) / f"program_{number}.py").write_text(program)
            command = ["bash", "-euo", "pipefail"] if language == "bash" else [sys.executable]
            if subprocess.run([*command, file], cwd=folder if in_turn else None, env=places).returncode:
                if INDEX in program:
                    return f"{page}: left out: the package index cannot be reached"
                sys.exit(f"{page}: failed:\n{program}")
    return f"{page}: {len(programs)} programs ran"


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("pages", nargs="+", help="pages of Markdown")
parser.add_argument("--in-turn", action="store_true", help="in one folder, with those of bash")
parser.add_argument("--short", action="store_true", help="of each --steps a quarter")
args = parser.parse_args()
for page in args.pages:
    print(run(page, args.in_turn, args.short))
