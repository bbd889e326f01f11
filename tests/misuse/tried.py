"""Many drawn cases of misuse, and the report that the sweeps print of them."""

import sys
from collections import Counter
from collections.abc import Callable

from misuse.draw import Draw
from misuse.hold import Wrong


def tried(case: Callable[[Draw, int], str], cases: int, seed: str) -> tuple[Counter, list[str]]:
    """(how often each outcome came, what was wrong) of `cases` calls of `case(draw, number)`."""
    outcomes, failures = Counter(), []
    for number in range(cases):
        try:
            outcomes[case(Draw(f"{seed} {number}"), number)] += 1
        except Wrong as error:
            failures.append(f"case {number}: {error}")
    return outcomes, failures


def report(outcomes: Counter, failures: list[str], cases: str) -> None:
    """Prints the outcomes and the first failures; exits with 1 if there is a failure."""
    for outcome, count in sorted(outcomes.items(), key=lambda item: -item[1]):
        print(f"{count:8}  {outcome}")
    for text in failures[:20]:
        print("\n" + text)
    print(f"\n{cases}: {len(failures)} wrong")
    sys.exit(bool(failures))
