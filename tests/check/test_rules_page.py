"""docs/rules.md names every rule; what it says is refused is refused, by that rule, and what is right passes."""

import re
import textwrap
from pathlib import Path

import pytest

from scaling.check import RULES, check_source

PAGE = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n")[0]: re.findall(r"```python\n(.*?)```", part, re.S) for part in PAGE.split("\n## ")[1:]}
HEAD = "import torch\nfrom torch.func import grad\nfrom scaling.collectives import all_gather, all_reduce, einsum\n"
HEAD += "from scaling.collectives import reduce_scatter, shard, wait\n"


def rules_of(example: str) -> set[str]:
    if "def " not in example and "SPECS" not in example and "ignore" not in example:
        about = '    """Of a[I, J_X], b[J_X, K], bias[K]."""\n'
        example = "def f(a, b, bias, mesh):\n" + about + textwrap.indent(example, "    ") + "    return w\n"
    return {finding.rule for finding in check_source(HEAD + example)}


def test_every_rule_is_on_the_page():
    assert list(SECTIONS) == list(RULES)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "python"])
def test_the_examples_are_as_the_page_says(rule):
    refused, right = SECTIONS[rule]
    assert rule in rules_of(refused)
    assert rules_of(right) == set()
