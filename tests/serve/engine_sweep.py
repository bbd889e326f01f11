"""Random traces through the scheduler with a model of whole numbers: `python tests/serve/engine_sweep.py [10000]`.

Half a minute on one core. Prints how often each thing happened: a sweep that evicts or preempts nothing proves nothing.
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import mock_model

if __name__ == "__main__":
    total: Counter[str] = Counter()
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    for seed in range(count):
        try:
            total += mock_model.run(seed)
        except BaseException:
            print(f"trace {seed}")
            raise
    print(f"{count:,} traces: " + ", ".join(f"{what} {n:,}" for what, n in sorted(total.items())))
