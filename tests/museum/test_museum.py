"""The bugs that types refuse are refused, and the page shows what the command prints. (What runs on ranks, it runs.)"""

import ast

import museum
import pytest
from sources import parsed


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in museum.BUGS if not bug.fails], ids=lambda bug: bug.name)
def test_refused_before_anything_is_sent(bug):
    assert museum.seen(bug)


@pytest.mark.parametrize("bug", [bug for bug in museum.BUGS if bug.fails], ids=lambda bug: bug.name)
def test_those_that_a_test_sees_can_be_planted(bug):
    assert museum.planted(bug)
    file, _, test = bug.fails.partition("[")[0].partition("::")
    assert test in [node.name for node in parsed(museum.ROOT / file).body if isinstance(node, ast.FunctionDef)]


def test_the_page_shows_what_the_command_prints():
    page, readme = ((museum.ROOT / name).read_text(encoding="utf-8") for name in ("docs/museum.md", "README.md"))
    assert museum.table() in page
    assert all(link in page for bug in museum.BUGS for link in bug.links)
    typed = sum(not bug.fails for bug in museum.BUGS)
    assert typed >= (len(museum.BUGS) - 1) * 5 / 7  # but for how a sum is rounded, which is no matter of types
    assert f"plants {len(museum.BUGS)} silent bugs of other systems here: types refuse {typed} of them" in readme
    assert f"other {len(museum.BUGS) - typed}." in readme
