"""Closed forms of pipeline schedules: their published bubble and memory, which the simulator must meet exactly.

There are P stages, M microbatches and v chunks per rank. F, B and W are the times that one microbatch takes on one rank
(over all the rank's chunks): forward, in the input half of the backward, and in its weight half. Transfers take no
time. `scaling.schedules.families` has the sources.
"""

from fractions import Fraction

from scaling.schedules import make
from scaling.schedules.simulator import UNIT, Times


def bubble_time(name: str, stages: int, microbatches: int, chunks: int = 1, times: Times = UNIT) -> Fraction:
    """Return the time for which the last rank is idle: the makespan less its M (F + B + W).

    naive         (P-1) M (F + B + W)
    gpipe, 1f1b   (P-1) (F + B + W)
    interleaved   (P-1) (F + B + W) / v                         Narayanan et al. 2021, equation in section 2.2.2
    zb-h1         (P-1) (F + B - W)                             Qi et al. 2023, table 1, if M >= P and W <= F, B;
                                                                if M < P, (P-1) (F + B) - (M-1) W
    dualpipev     (P-1) (F&B + (B + W) - 3 W), for one chunk    github.com/deepseek-ai/DualPipe, if F = B >= W

    Raises:
        ValueError: The schedule is not defined for these numbers, or the formula does not hold for these times.
    """
    make(name, stages, microbatches, chunks)
    f, b, w = (Fraction(time) for time in (times.forward, times.backward_input, times.backward_weight))
    others = stages - 1
    if times.hop:
        raise ValueError(
            "the published bubbles count no time for transfers: simulate with hop > 0 instead"
            "\n  fix: use scaling.schedules.simulator.simulate"
        )
    if name == "naive":
        return others * microbatches * (f + b + w)
    if name in ("gpipe", "1f1b", "interleaved"):
        return others * (f + b + w) / chunks
    if name == "zb-h1":
        if w > min(f, b):
            raise ValueError(
                f"zb-h1: the published bubble holds for W <= F and W <= B, not F={f}, B={b}, W={w}"
                "\n  fix: use scaling.schedules.simulator.simulate for these times"
            )
        return others * (f + b) - min(others, microbatches - 1) * w
    if f != b or w > b:
        raise ValueError(
            f"dualpipev: the published bubble is met where F = B >= W, not with F={f}, B={b}, W={w}"
            "\n  fix: use scaling.schedules.simulator.simulate for these times"
        )
    return others * ((f + b + w) + (b + w) - 3 * w) / chunks


def bubble(name: str, stages: int, microbatches: int, chunks: int = 1, times: Times = UNIT) -> Fraction:
    """Return the fraction of the makespan for which ranks are idle.

    It is (P-1)/(M+P-1) for gpipe and 1f1b, and (P-1)/(vM+P-1) for interleaved.
    """
    idle = bubble_time(name, stages, microbatches, chunks, times)
    work = Fraction(times.forward) + Fraction(times.backward_input) + Fraction(times.backward_weight)
    return idle / (idle + microbatches * work)


def live_activations(name: str, stages: int, microbatches: int, chunks: int = 1) -> tuple[Fraction, ...]:
    """Return each rank's peak number of live activations, in microbatches of all the rank's layers.

    On rank r it is 1 for naive, M for gpipe, P - r for 1f1b, P for zb-h1, ((v-1) P + 2 (P-1-r) + 1) / v for interleaved
    and (2P + 1) / 2 for dualpipev, and never more than M.
    """
    schedule = make(name, stages, microbatches, chunks)
    m, v, ranks = microbatches, schedule.chunks, range(stages)
    if name == "interleaved" and v > 1:
        peaks = [Fraction((v - 1) * stages + 2 * (stages - 1 - r) + 1, v) for r in ranks]
    else:
        peaks = {
            "naive": [1 for _ in ranks],
            "gpipe": [m for _ in ranks],
            "1f1b": [stages - r for r in ranks],
            "interleaved": [stages - r for r in ranks],
            "zb-h1": [stages for _ in ranks],
            "dualpipev": [Fraction(2 * stages + 1, 2) for _ in ranks],
        }[name]
    return tuple(Fraction(min(peak, m)) for peak in peaks)
