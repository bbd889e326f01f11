"""The simulator beside the engine on traces that it was not calibrated on: `python tests/serve/simulator_sweep.py`.

Two minutes on one core. The engine's clock is the time of its processor, which others on the machine disturb less; it
is calibrated just before and just after each trace, since a machine's speed drifts from minute to minute. The simulator
says how many requests a second are too many; the traces have 0.5 and 0.7 of them (nearer to it, how long a request
waits says more of the noise than of the engine), and one has all at once. The steps are compared on all of them: where
each step takes in the simulator what it took in the engine, they must be the same ones.
"""

import random
import statistics
import sys
import time

import calibrate
import torch

from scaling.common.console import Parser
from scaling.configs import Config
from scaling.models import transformer
from scaling.serve.engine import Engine
from scaling.serve.requests import Request
from scaling.serve.simulate import drive, simulate
from scaling.serve.states import Options

CONFIG = Config("ten million", L=6, D=256, F=768, N=8, K=4, H=32, V=4096)


def arrivals(seed: int, count: int, gap: float):
    """Poisson arrivals, with prompts of 8 to 120 tokens and 4 to 40 to give; a third share a prefix."""
    chance, now = random.Random(seed), 0.0
    stem, found = [chance.randrange(CONFIG.V) for _ in range(48)], []
    for id in range(count):
        own = [chance.randrange(CONFIG.V) for _ in range(chance.randint(8, 72))]
        found.append((now, Request(id, tuple((stem if chance.random() < 1 / 3 else []) + own), chance.randint(4, 40))))
        now += gap * chance.expovariate(1)
    return found


def main() -> int:
    torch.set_num_threads(1)
    params, good = transformer.init(CONFIG, 0), True
    print(f"{'policy':14}{'steps':>7}{'same':>6}  simulated over measured: TTFT p50, p95, TPOT p50, p95, tokens/s")
    for policy in ("static", "interleaved", "chunked", "disaggregated"):
        options = Options(pages=80, page=16, slots=8, budget=64, policy=policy)

        def measured(seed: int, gap: float, count: int = 40, options=options):
            engine, taken = Engine(params, CONFIG, options, clock=time.process_time), []

            def execute(action):
                seconds, tokens = engine(action)
                taken.append(seconds)
                return seconds, tokens

            return drive(arrivals(seed, count, gap), options, execute), taken

        def spans(seed: int) -> list:
            return measured(seed, 0.05)[0].spans

        def priced(spans: list, options=options):
            return calibrate.cost(calibrate.fit(spans, options.page), options.page)

        measured(0, 0.0)
        ratios, same, before = [], True, spans(1)
        least = simulate(arrivals(1, 40, 0.0), options, priced(before)).seconds / 40  # a request's, all slots taken
        for seed, gap, count in ((11, least / 0.5, 80), (12, least / 0.7, 80), (13, 0.0, 40)):
            (real, taken), trace = measured(seed, gap, count), arrivals(seed, count, gap)
            after = spans(seed - 9)
            cost, before = priced(before + after), after
            given = {id: (*times.tokens,) for id, times in real.requests.items()}
            times, starts = iter(taken), {request.id: len(request.prompt) for _, request in trace}
            token = lambda id, place, given=given, starts=starts: given[id][place - starts[id]]  # noqa: E731
            model = simulate(trace, options, cost, token=token)
            ratios.append(
                [model.percentile(w, p) / real.percentile(w, p) for w in ("ttft", "tpot") for p in (50, 95)]
                + [model.throughput / real.throughput]
            )
            replayed = simulate(trace, options, lambda action, times=times: next(times), token=token)
            same &= replayed.steps == real.steps
            if not gap and policy != "disaggregated":  # the order of events does not depend on the times
                same &= model.steps == real.steps
        middle = [statistics.median(column) for column in zip(*ratios, strict=True)]
        good &= same and all(abs(r - 1) < 0.2 for r in middle[:4]) and abs(middle[4] - 1) < 0.1
        print(f"{policy:14}{len(real.spans):7}{same!s:>6}  " + ", ".join(f"{r:.2f}" for r in middle))
    return 0 if good else 1


if __name__ == "__main__":
    Parser(description=__doc__).parse_args()
    sys.exit(main())
