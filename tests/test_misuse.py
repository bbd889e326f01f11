"""Some cases of the fuzz tests of misuse: tests/sweeps/fuzz.py runs ten thousand. tests/collectives/test_drawn.py has
those of single calls."""

import pytest
from misuse import rooms


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of complex numbers cut off
def test_no_number_is_wrong_without_an_error_in_the_rooms_above_the_collectives():
    outcomes, failures = rooms.run(120, 1)
    assert not failures, "\n\n".join(failures)
    assert sum(count for outcome, count in outcomes.items() if "right" in outcome) > 20
    assert sum(count for outcome, count in outcomes.items() if "refused" in outcome) > 50
