"""The cost of failures in a long run: how often they come, how often to save, spare hosts, and the goodput.

    found = of_job(chips=16384, save=30.0)
    found.interval, found.goodput        2,450 s and 0.90

A job of N chips fails N times as often as one chip. Saving every `tau` seconds costs `save` seconds each time, and a
failure costs the work since the last save and a restart. Young's interval, sqrt(2 save M) with M seconds between
failures, balances the two; Daly's adds higher orders (J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006).
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from scaling.common.arguments import not_negative, positive, whole

HOUR = 3600.0
REPAIR = 24 * HOUR  # until a host that failed is back
STORAGE = 2e12 / 16_384  # bytes/s that storage takes from a chip: Llama 3's 2 TB/s, arXiv:2407.21783, section 3.3.1
ENOUGH = 0.99  # the probability that the spare hosts are enough
PUBLISHED = (  # (run, chips, hours, interruptions, source)
    ("Llama 3 405B", 16_384, 54 * 24, 419, "arXiv:2407.21783, section 3.3.4: more than 90% effective"),
    ("Meta's research cluster", 8, 1000 * 24, 6.5, "arXiv:2410.21680: 6.5 in a thousand days of a node of 8"),
    ("OPT-175B", 992, 60 * 24, 35, "arXiv:2205.01068, section 2.5: at least 35 restarts in two months"),
    ("BLOOM", 384, 7 * 24, 1.5, "arXiv:2211.05100, section 3.4: one or two GPUs a week"),
)
MTBF = PUBLISHED[0][1] * PUBLISHED[0][2] / PUBLISHED[0][3]  # hours of one chip: Llama 3's, 50,700


def young(save: float, mtbf: float) -> float:
    """Return Young's interval between saves: sqrt(2 save M), all in seconds."""
    return math.sqrt(2 * save * mtbf)


def daly(save: float, mtbf: float) -> float:
    """Return Daly's interval between saves, in seconds; it is `mtbf` if a save takes at least twice as long as that."""
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return young(save, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


@dataclass(frozen=True)
class Failures:
    """A job under failures; times are seconds.

    `mtbf` is the mean between failures, `save` and `restart` the time that one takes, `interval` that between saves,
    and `spares` the number of spare hosts.
    """

    chips: int
    mtbf: float
    save: float
    restart: float
    interval: float
    spares: int

    @property
    def goodput(self) -> float:
        """The share of the time that advances the run: tau of M e^(R/M) (e^((tau + save)/M) - 1) seconds (Daly)."""
        segment = self.mtbf * math.exp(self.restart / self.mtbf) * math.expm1((self.interval + self.save) / self.mtbf)
        return self.interval / segment

    @property
    def costs(self) -> dict[str, float]:
        """Shares of the time, to first order: saving, repeating lost work, restarting."""
        saving = self.save / (self.interval + self.save)
        lost = (self.interval + self.save) / 2 / self.mtbf
        return {"saving": saving, "work done again": lost, "restarting": self.restart / self.mtbf}


def save_seconds(nbytes: float) -> float:
    """Return the seconds for which a run waits while each chip writes `nbytes` bytes."""
    return max(1.0, nbytes / STORAGE)


def of_job(
    chips: int, save: float, mtbf_hours: float = MTBF, restart: float = 600.0,
    interval: float | None = None,
) -> Failures:  # fmt: skip
    """Return what failures cost a job.

    Args:
        chips: The chips of the job.
        save: Seconds for which a save stops the run.
        mtbf_hours: Hours between failures of one chip, with its share of host and network.
        restart: Seconds from a failure until the run computes again.
        interval: Seconds between saves; Daly's if none is given.
    """
    whole(chips=chips)
    positive(save=save, mtbf_hours=mtbf_hours)
    not_negative(restart=restart)
    mtbf = HOUR * mtbf_hours / chips
    away = REPAIR / mtbf  # hosts in repair, on average
    return Failures(chips, mtbf, save, restart, interval or daly(save, mtbf), spare_hosts(away))


def spare_hosts(away: float) -> int:
    """Return the spares that are enough for 99% of the time if `away` hosts are in repair on average (Poisson)."""
    if away > 100:  # near enough to a normal distribution, and e^-away is no number any more
        return math.ceil(away + 2.326 * math.sqrt(away))
    term = total = math.exp(-away)
    count = 0
    while total < ENOUGH:
        count += 1
        term *= away / count
        total += term
    return count


def simulated(job: Failures, seconds: float, seed: int = 0) -> Iterator[tuple[str, float, float]]:
    """Yield (what, start, end) of a random run in time: "work", "save", "lost" and "restart".

    Work that a failure undoes is "lost"; a failure during a restart begins the restart again.
    """
    draw, now = random.Random(seed), 0.0
    fails = draw.expovariate(1 / job.mtbf)
    while now < seconds:
        work, saved = now + job.interval, now + job.interval + job.save
        if fails >= saved:
            yield "work", now, work
            yield "save", work, saved
            now = saved
            continue
        yield "lost", now, fails
        now = fails
        while True:
            fails = now + draw.expovariate(1 / job.mtbf)
            end = min(fails, now + job.restart)
            yield "restart", now, end
            now = end
            if fails > end:
                break


def _time(seconds: float) -> str:
    """Return "4.16 minutes" or "1,080 hours", in three digits."""
    n, unit = (seconds / HOUR, "hours") if seconds >= 2 * HOUR else (seconds / 60, "minutes")
    return f"{n:,.0f} {unit}" if n >= 100 else f"{n:.3g} {unit}"


def failure_lines(job: Failures, days: float | None = None) -> list[str]:
    """Return the lines that `plan --failures` prints."""
    mtbf, interval, youngs = (_time(seconds) for seconds in (job.mtbf, job.interval, young(job.save, job.mtbf)))
    save = _time(job.save) if job.save >= 1000 else f"{job.save:.3g} s"
    costs = ", ".join(f"{name} {share:.1%}" for name, share in job.costs.items())
    found = [
        "Failures (--mtbf, --restart and --save say otherwise):",
        f"  one every {mtbf} on {job.chips:,} chips, as one chip fails every {job.mtbf * job.chips / HOUR:,.0f} hours",
        f"  save every {interval} (Daly; Young {youngs}), {save} each; a restart takes {job.restart / 60:,.3g} minutes",
        f"  goodput {job.goodput:.1%}: {costs}",
        f"  {job.spares:,} spare host{' is' if job.spares == 1 else 's are'} enough for 99% of the time, if each "
        "failure takes its host away for a day",
    ]
    if days is not None:
        found.append(f"  with failures the forecast run takes {days / job.goodput:,.1f} days instead of {days:,.1f}")
    found.append("  Published: " + "; ".join(
        f"{name}, a chip every {chips * hours / count:,.0f} hours ({source})"
        for name, chips, hours, count, source in PUBLISHED
    ))  # fmt: skip
    return found


def as_dict(job: Failures, days: float) -> dict:
    """Return the cost of failures as data, in seconds, shares and days."""
    return {
        "seconds_between_failures": job.mtbf, "save_seconds": job.save, "restart_seconds": job.restart,
        "interval_seconds": job.interval, "goodput": job.goodput, "costs": job.costs, "spare_hosts": job.spares,
        "days": days / job.goodput,
    }  # fmt: skip
