"""The measurements of a server, for Prometheus and for its page."""

import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from scaling.serve.states import State

WINDOW = 2.0  # seconds over which tokens a second are counted
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # bounds of the histograms, seconds
LATER = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Figures:
    """The measurements of one server, in its private registry."""

    def __init__(self):
        self.registry = CollectorRegistry()
        own = {"registry": self.registry, "namespace": "scaling"}
        self.asked = Counter("prompt_tokens", "tokens of the prompts that were accepted", **own)
        self.tokens = Counter("generated_tokens", "tokens that were generated", **own)
        self.requests = Counter("requests", "requests that have ended, by reason", ["reason"], **own)
        self.refusals = Counter("refusals", "calls that were refused, by status", ["status"], **own)
        self.ttft = Histogram("time_to_first_token_seconds", "from arrival to first token", buckets=FIRST, **own)
        self.tpot = Histogram("time_per_output_token_seconds", "from one token to the next", buckets=LATER, **own)
        self.gauges = {name: Gauge(name, text, **own) for name, text in GAUGES.items()}
        self._lately: deque[float] = deque()

    def token(self, now: float) -> None:
        """Count a generated token."""
        self.tokens.inc()
        self._lately.append(now)
        while self._lately[0] < now - WINDOW:
            self._lately.popleft()

    def ended(self, reason: str) -> None:
        """Count a request that has ended."""
        self.requests.labels(reason).inc()

    def now(self, state: State) -> dict[str, float]:
        """Return the present value of each gauge, by its name in GAUGES."""
        since = time.monotonic() - WINDOW
        live, pools = list(state.live.values()), [pool for pools in state.pools.values() for pool in pools]
        return {
            "batch": sum(len(works) for works in state.busy.values()),
            "running": sum(one.where is not None for one in live),
            "waiting": sum(one.where is None for one in live),
            "pages": sum(pool.total for pool in pools),
            "pages_held": sum(pool.held for pool in pools),
            "pages_cached": sum(pool.cached for pool in pools),
            "tokens_per_second": sum(at >= since for at in list(self._lately)) / WINDOW,
        }

    def text(self, state: State) -> bytes:
        """Return all measurements in Prometheus' format."""
        for name, value in self.now(state).items():
            self.gauges[name].set(value)
        return generate_latest(self.registry)


GAUGES = {
    "batch": "requests in the step that runs",
    "running": "requests in a slot",
    "waiting": "requests that wait for a slot or for pages",
    "pages": "pages of the cache",
    "pages_held": "pages that requests hold",
    "pages_cached": "pages that nobody holds, kept for prompts that begin alike",
    "tokens_per_second": f"generated tokens a second, over the last {WINDOW:.0f} seconds",
}
