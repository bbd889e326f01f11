"""Random traces through the scheduler: `python tests/serve/engine_sweep.py [10000] [--model 300]`.

First with a model of whole numbers, half a minute on a core; then some with a real one, greedy and sampled requests by
turns, each of which must give what `generate` gives it alone. Prints how often each thing happened: a sweep that evicts
or preempts nothing proves nothing.
"""

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import mock_model

from scaling import serve
from scaling.common.console import Parser
from scaling.configs import Config
from scaling.models import transformer
from scaling.serve import scheduler
from scaling.serve.engine import Engine
from scaling.serve.requests import Draw, Request, Sampling
from scaling.serve.simulate import drive

CONFIG = Config("small", L=2, D=8, F=12, N=2, K=1, H=4, V=mock_model.V, window=(None, 3))
PARAMS = transformer.tree.map(lambda W: 4 * W, transformer.init(CONFIG, 0, torch.float64))


@cache
def alone(request: Request) -> tuple[int, ...]:
    """What `generate` gives; a request with an odd id is sampled, by its own seed."""
    how = {"temperature": 1.0, "seed": [request.id]} if request.id % 2 else {}
    given = {"stop": tuple(request.stop)} | how
    return (*serve.generate(PARAMS, [request.prompt], CONFIG, request.max_new_tokens, **given)[0],)


def real(seed: int) -> Counter[str]:
    """One trace with the real model, its clock drawn; how often what happened."""
    options, arrivals, cancel = mock_model.trace(seed)
    arrivals = [(t, r._replace(draw=Draw(Sampling(1.0), r.id)) if r.id % 2 else r) for t, r in arrivals]
    chance, requests = random.Random(seed + 1), [request for _, request in arrivals]
    audited = mock_model.Audited(options, chance)
    clock = itertools.accumulate(chance.choice([0.0, 1.0, 1.0, 2.5]) for _ in itertools.count()).__next__
    engine = Engine(PARAMS, CONFIG, options, draft="ngram" if options.proposals else None, clock=clock)
    served = drive(arrivals, options, engine, cancel=cancel, watch=audited.watch)
    assert not audited.before.live, "a request is starved"
    for request in requests:
        times = served.requests[request.id]
        audited.counts[times.reason.split(":")[0]] += 1
        if scheduler.refusal(request, options):
            assert times.reason.startswith("refused"), times
            continue
        wanted = alone(request)
        kept = wanted[: len(times.tokens)] if times.reason == "cancelled" else wanted
        assert times.tokens == kept, (request, times)
    return audited.counts


def sweep(what: str, run: Callable[[int], Counter[str]], count: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(count):
        try:
            total += run(seed)
        except BaseException:
            print(f"trace {seed}, {what}")
            raise
    print(f"{count:,} traces, {what}: " + ", ".join(f"{name} {n:,}" for name, n in sorted(total.items())))


if __name__ == "__main__":
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("traces", type=int, nargs="?", default=10_000, help="with the model of whole numbers")
    parser.add_argument("--model", type=int, default=300, help="with the real one (default 300)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sweep("whole numbers", mock_model.run, args.traces)
    sweep("the real model", real, args.model)
    kinds = {alone(Request(id, (a, b), 8)) for id in range(2) for a in range(mock_model.V) for b in range(mock_model.V)}
    print(f"{len(kinds)} different completions of 50 prompts of two tokens")
