import pytest

from scaling.book.answers import Answer, report, rounding
from scaling.cost.units import significant


@pytest.mark.parametrize(
    ("text", "value", "slack"),
    [("4.2e11", 4.2e11, 1e10), ("47,000", 47000, 1000), ("0.33", 0.33, 0.01), ("100", 100, 50), ("13.0e9", 13e9, 1e8)],
)
def test_rounding(text, value, slack):
    assert rounding(text) == (pytest.approx(value), pytest.approx(slack))


def test_significant():
    assert [significant(x) for x in (13.0154e9, 0.91506, 44.35, 850, 3.2e-6, 0)] == [
        "13.02e9", "0.9151", "44.35", "850", "3.2e-6", "0",
    ]  # fmt: skip


def test_verdicts(capsys):
    assert Answer("", "4.2e11", 4.23e11).verdict == "agrees"
    assert Answer("", "4.2e11", 4.4e11).verdict == "DIFFERS"
    assert Answer("", "4.2e11", 4.4e11, erratum="why").verdict == "erratum"
    assert Answer("", "4.2e11", 4.2e11, erratum="there is none").verdict == "DIFFERS"
    assert Answer("", "", 3.0, note="derived").verdict == "ours"
    assert Answer("", "", 3.0).verdict == "DIFFERS"
    assert Answer("", "yes", "yes").verdict == "agrees"
    assert Answer("", "yes", "no").verdict == "DIFFERS"
    assert report([Answer("a", "1.0", 1.0), Answer("b", "", 1.0, note="n")]) == 0
    assert "1 agrees, 1 ours" in capsys.readouterr().out
    assert report([Answer("a", "1.0", 2.0)]) == 1
    with pytest.raises(ValueError, match="is no number"):
        rounding("about ten")
