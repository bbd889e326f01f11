"""The bugs that types refuse are refused, and the page shows what the command prints. (What runs on ranks, it runs.)"""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import museum
from bugs import BUGS

PAGE = museum.ROOT / "docs" / "museum.md"


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in BUGS if not bug.fails], ids=lambda bug: bug.name)
def test_refused_before_anything_is_sent(bug):
    assert museum.seen(bug)


def test_those_that_a_test_sees_can_be_planted():
    for bug in BUGS:
        assert bug.fails or bug.refused or bug.raises[0]
        assert museum.planted(bug)
    tests = sorted({bug.fails for bug in BUGS if bug.fails})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", "", *tests]
    found = subprocess.run(command, cwd=museum.ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr  # each names a test that exists


def test_the_page_shows_what_the_command_prints():
    page = PAGE.read_text(encoding="utf-8")
    assert museum.table() in page
    assert all(link in page for bug in BUGS for link in bug.links)
    typed, readme = sum(not bug.fails for bug in BUGS), (museum.ROOT / "README.md").read_text(encoding="utf-8")
    assert typed >= (len(BUGS) - 1) * 5 / 7  # but for how a sum is rounded, which is no matter of types
    assert f"plants {len(BUGS)} silent bugs of other systems here: types refuse {typed} of them" in readme
    assert f"other {len(BUGS) - typed}." in readme
