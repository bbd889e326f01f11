"""Some hundred cases of the fuzz test of misuse: `python tests/sweeps/fuzz_misuse.py` runs ten thousand."""

import pytest
from fuzz_misuse import run

CASES = 300


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own tracers
def test_no_number_is_wrong_without_an_error(ranks):
    for outcomes, failures in ranks(run, {"X": 2, "Y": 2}, CASES, 1):
        assert not failures, "\n\n".join(failures)
        assert sum(outcomes.values()) == CASES
        right = sum(count for outcome, count in outcomes.items() if ": right" in outcome)
        refused = sum(count for outcome, count in outcomes.items() if "refused" in outcome)
        assert right > CASES / 4
        assert refused > CASES / 4
