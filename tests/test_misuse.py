"""Some hundred cases of the fuzz tests of misuse: tests/sweeps/fuzz.py runs ten thousand."""

import pytest
from misuse import rooms, typed

CASES = 300


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own tracers
def test_no_number_is_wrong_without_an_error(ranks):
    for outcomes, failures in ranks(typed.run, {"X": 2, "Y": 2}, CASES, 1):
        assert not failures, "\n\n".join(failures)
        assert sum(outcomes.values()) == CASES
        right = sum(count for outcome, count in outcomes.items() if ": right" in outcome)
        refused = sum(count for outcome, count in outcomes.items() if "refused" in outcome)
        assert right > CASES / 4
        assert refused > CASES / 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of complex numbers cut off
def test_nor_in_the_rooms_above_the_collectives():
    outcomes, failures = rooms.run(120, 1)
    assert not failures, "\n\n".join(failures)
    assert sum(count for outcome, count in outcomes.items() if "right" in outcome) > 20
    assert sum(count for outcome, count in outcomes.items() if "refused" in outcome) > 50
