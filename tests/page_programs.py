"""Runs the programs on a page, each by itself: `python tests/page_programs.py docs/your-own-code.md`."""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("pages", nargs="+", help="pages of Markdown")
for page in parser.parse_args().pages:
    programs = re.findall(r"^```python\n(.*?)^```", Path(page).read_text(), re.MULTILINE | re.DOTALL)
    for number, program in enumerate(programs, 1):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"program_{number}.py"
            file.write_text(program)
            subprocess.run([sys.executable, file], check=True)
    print(f"{page}: {len(programs)} programs ran")
