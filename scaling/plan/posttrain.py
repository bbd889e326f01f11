"""Divide chips between the two sides of post-training: `python -m scaling.plan posttrain --model llama3-8b ...`.

    python -m scaling.plan posttrain --model llama3-8b --chip h100 --chips 64 --prompts 128 --group 16 --output 2048

A step writes `group` answers to each of its prompts, trains on them, and pushes the new weights to the serving mesh.
Colocated, all chips write first and then train. Apart, some chips write while the others train on the answers of the
step before, which are one update old. Then the slower side sets the pace, so the best division is where neither waits.

Training is `scaling.plan`'s forecast of its best layout, and writing is `scaling.plan serve`'s of its best form and
number of replicas. The push is bounded by the bytes that a serving chip receives and a training chip sends.

Colocated, training waits for the longest answer, which in the end is the only one that its replica still writes. Apart,
other answers are written meanwhile, so the longest one only matters if it takes longer than the whole step.
"""

import json
import math
import sys
from dataclasses import dataclass, replace

from scaling.common.arguments import whole
from scaling.common.console import Parser, chip_count, complain, complaining, integer, number, table, whole_count
from scaling.configs import Config, get
from scaling.configs.sources import HELP
from scaling.hardware import CHIPS, Chip, chip
from scaling.plan.candidates import plans
from scaling.plan.classes import error_line
from scaling.plan.evaluate import Estimate
from scaling.plan.job import Job, run_bytes
from scaling.plan.report import folded, several
from scaling.plan.serve import candidates
from scaling.plan.serve.report import off_by

TRIED = 16  # the finest division of the chips
STRIDES = (4, 2, 1)  # of the search among the divisions
REFERENCE = 1 / 3  # a forward pass of the reference model, as a share of a training step


@dataclass(frozen=True)
class PosttrainJob:
    """The work of a step: its answers, their lengths in tokens, and the number of reference models.

    Attributes:
        config: The model.
        prompts: Prompts of a step.
        group: Answers to each prompt.
        prompt: Tokens of a prompt.
        output: Tokens of an answer, on average.
        longest: Tokens of a step's longest answer; 0: `output`, so that all are as long.
        references: Other models whose log-probabilities the loss needs: 1 with a KL term, else 0.
        dtype: The dtype of weights, caches and products.
    """

    config: Config
    prompts: int
    group: int
    prompt: int
    output: int
    longest: int = 0
    references: int = 0
    dtype: str = "bf16"

    def __post_init__(self):
        whole(prompts=self.prompts, group=self.group, prompt=self.prompt, output=self.output)
        if self.longest and self.longest < self.output:
            raise ValueError(
                f"the longest answer has {self.longest:,} tokens, fewer than the average of {self.output:,}\n"
                "  fix: give a longest of at least the average"
            )

    @property
    def answers(self) -> int:
        """Answers of a step."""
        return self.prompts * self.group

    @property
    def job(self) -> Job:
        """The training step, on sequences of the average length."""
        seq = self.prompt + self.output
        return Job(self.config, self.answers * seq, seq, self.dtype, *run_bytes(self.dtype))

    @property
    def service(self) -> candidates.Service:
        """The serving of the answers."""
        context, dtype = self.prompt + self.output, self.dtype
        return candidates.Service(self.config, context, self.output, dtype, dtype, dtype, over_time=True)


@dataclass(frozen=True)
class Division:
    """Chips that train and chips that write, with each side's plan and seconds.

    Attributes:
        training: The layout of the training step.
        serving: The form and replicas of the serving mesh.
        train: Seconds of training on a step's answers.
        write: Seconds of writing them.
        push: Seconds of sending the weights.
        apart: Whether each side has its own chips, so that both work at the same time.
    """

    training: Estimate
    serving: candidates.ServingPlan
    train: float
    write: float
    push: float
    apart: bool

    @property
    def train_chips(self) -> int:
        """Chips that train."""
        return math.prod(self.training.network.sizes.values())

    @property
    def write_chips(self) -> int:
        """Chips that write."""
        return self.serving.chips * self.serving.replicas

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.push + (max(self.train, self.write) if self.apart else self.train + self.write)

    @property
    def waiting(self) -> float:
        """The share of all chips' time in which they neither train nor write."""
        if not self.apart:
            return self.push / self.seconds
        busy = self.train_chips * self.train + self.write_chips * self.write
        return 1 - busy / (self.train_chips + self.write_chips) / self.seconds


def writing(asked: PosttrainJob, hardware: Chip, chips: int) -> tuple[float, candidates.ServingPlan] | None:
    """Return the least seconds in which the chips write a step's answers, and the plan; None if the model does not fit.

    The replicas share the answers evenly. Each writes at most its plan's batch at once, in as many rounds as it needs.
    """
    found = []
    for plan in candidates.plans(asked.service, hardware, chips=chips, replicas=None):
        each = math.ceil(asked.answers / plan.replicas)
        whole_groups = math.ceil(each / plan.groups) * plan.groups
        held = replace(plan, batch=min(plan.batch, whole_groups))
        rounds = math.ceil(each / held.batch)
        found.append((rounds * asked.output * held.tpot, held))
    return min(found, key=lambda pair: pair[0], default=None)


def push_seconds(
    asked: PosttrainJob, hardware: Chip, train_chips: int, serving: candidates.ServingPlan, apart: bool
) -> float:
    """Return the seconds of a push: the bytes of a serving or a training chip, over its slowest link."""
    nbytes = asked.service.load.weights
    received, sent = nbytes / serving.chips, nbytes * serving.replicas / train_chips
    return max(received, sent) / link(hardware, train_chips + (serving.chips * serving.replicas if apart else 0))


def link(hardware: Chip, chips: int) -> float:
    """Return the bytes/s of a chip's share of the slowest link among `chips` chips."""
    if hardware.kind == "tpu":
        return hardware.bandwidth("ici" if chips <= math.prod(hardware.longest) else "dcn")
    node = hardware.need("levels")[0].degree
    return hardware.bandwidth("node") if chips <= node else hardware.bandwidth("scale-out") / node


def training(asked: PosttrainJob, hardware: Chip, chips: int) -> Estimate | None:
    """Return the best layout that fits the chips, or None; chips that outnumber the tokens of a step are too many."""
    try:
        best = plans(asked.job, hardware, chips)[0] if chips <= asked.job.batch else None
    except ValueError:  # no mesh of so many chips suits the model
        return None
    return best if best and best.fits else None


def divisions(asked: PosttrainJob, hardware: Chip, chips: int) -> list[Division]:
    """Return the colocated plan and the divisions that fit, the fastest first.

    Raises:
        ValueError: Nothing fits, or `chips` is not a whole number.
    """
    whole(chips=chips)
    counts, known, best = _counts(hardware, chips), {}, None
    for stride in STRIDES:  # one side slows down as the other speeds up, so the best is a neighbour of the best so far
        tries = range(stride - 1, len(counts), stride) if best is None else (best - stride, best + stride)
        new = [i for i in tries if 0 <= i < len(counts) and i not in known]
        known |= {i: _division(asked, hardware, counts[i], chips - counts[i], True) for i in new}
        best = min((i for i, one in known.items() if one), key=lambda i: known[i].seconds, default=None)
    found = [one for one in (_division(asked, hardware, chips, chips, False), *known.values()) if one is not None]
    if not found:
        fewer = (1 << i for i in reversed(range(min(chips, asked.job.batch).bit_length())))
        others = *(chips << i for i in range(1, 10)), *fewer
        enough = next((n for n in others if _division(asked, hardware, n, n, False)), 0)
        change = "or more prompts" if 0 < enough < chips else "fewer prompts, or shorter answers"
        raise ValueError(
            f"{asked.config.name} with {asked.job.batch:,} tokens a step fits {chips:,} {hardware.name} neither "
            f"colocated nor divided\n  fix: give {f'{enough:,}' if enough else 'more'} chips, {change}"
        )
    return sorted(found, key=lambda one: one.seconds)


def _counts(hardware: Chip, chips: int) -> range:
    """Return the numbers of chips that may train apart, in whole nodes if there are several."""
    node = hardware.need("levels")[0].degree if hardware.kind == "gpu" else 1
    unit = node if chips >= 2 * node and chips % node == 0 else 1
    step = unit * max(1, math.ceil(chips / unit / TRIED))
    return range(step, chips, step)


def _division(asked: PosttrainJob, hardware: Chip, train_chips: int, write_chips: int, apart: bool) -> Division | None:
    if (layout := training(asked, hardware, train_chips)) is None:
        return None
    if (written := writing(asked, hardware, write_chips)) is None:
        return None
    write, serving = written
    alone = replace(serving, batch=serving.groups).tpot  # a token of the last answer
    longest = asked.longest or asked.output
    write = max(write, longest * alone) if apart else write + (longest - asked.output) * alone
    train = float(layout.forecast) * (1 + REFERENCE * asked.references)
    push = push_seconds(asked, hardware, train_chips, serving, apart)
    return Division(layout, serving, train, write, push, apart)


def report(found: list[Division], asked: PosttrainJob, hardware: Chip, chips: int, top: int = 6) -> str:
    """Return the text that the command prints."""
    best, length = found[0], asked.prompt + asked.output
    where = (
        f"apart, training on {best.train_chips} of the chips and writing on {best.write_chips}" if best.apart
        else "colocated, writing and training in turn on all chips"
    )  # fmt: skip
    lines = [
        f"{asked.config.name}: {several(asked.answers, 'answer')} a step, {asked.prompt:,} + {asked.output:,} tokens, "
        f"the longest {asked.longest or asked.output:,}, "
        f"on {chips:,} {hardware.name}, {asked.dtype}",
        f"Best: {where}. A step takes {best.seconds:,.3g} s; the chips wait for {best.waiting:.0%} of it.",
        f"  training  {best.train:,.3g} s: {best.training.name}, {asked.answers * length:,} tokens",
        f"  writing   {best.write:,.3g} s: {_replicas(best.serving)} by {best.serving.form}, "
        f"a batch of {best.serving.batch:,} on each",
        f"  push      {best.push:,.3g} s: the weights, over the slowest link between the two sides",
    ]
    colocated = next((one for one in found if not one.apart), None)
    if best.apart and colocated is not None:
        lines.append(f"Colocated, a step takes {colocated.seconds / best.seconds:.2f} times as long.")
    if best.apart:
        lines.append("Apart, answers are one update old: --staleness 1 of scaling.posttrain.")
    rows = [
        ("apart" if one.apart else "colocated", one.train_chips, one.write_chips, f"{one.train:,.3g}",
         f"{one.write:,.3g}", f"{one.push:,.3g}", f"{one.seconds:,.3g}", f"{one.waiting:.0%}")
        for one in [*found[:top], *([colocated] if colocated not in (None, *found[:top]) else [])]
    ]  # fmt: skip
    heads = ["way", "train", "write", "training, s", "writing, s", "push, s", "step, s", "waiting"]
    lines += [
        "", table(rows, heads, 100), "",
        error_line(asked.job, hardware),
        f"A token's time is forecast, and {off_by(hardware)}.",
    ]  # fmt: skip
    return folded(lines)


def _replicas(serving: candidates.ServingPlan) -> str:
    """Return "4 replicas of one chip", say."""
    count, chips = serving.replicas, serving.chips
    return f"{several(count, 'replica')} of {several(chips, 'chip')}"


def as_dict(found: list[Division]) -> list[dict]:
    """Return the divisions as data, the fastest first."""
    return [
        {"apart": one.apart, "train_chips": one.train_chips, "write_chips": one.write_chips,
         "layout": one.training.name, "form": one.serving.form, "replicas": one.serving.replicas,
         "batch": one.serving.batch, "train_seconds": one.train, "write_seconds": one.write,
         "push_seconds": one.push, "step_seconds": one.seconds, "waiting": one.waiting}
        for one in found
    ]  # fmt: skip


@complaining(ValueError, OSError, code=2)
def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if nothing fits."""
    parser = Parser(prog="python -m scaling.plan posttrain", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", required=True, help=HELP)
    parser.add_argument("--chip", "--gpu", required=True, help=CHIPS)
    parser.add_argument(
        "--chips", "--gpus", required=True, type=chip_count, help="number of chips of both sides together"
    )
    parser.add_argument("--prompts", type=integer(1), default=64, help="prompts of a step (default 64)")
    parser.add_argument("--group", type=integer(1), default=8, help="answers to each prompt (default 8)")
    parser.add_argument("--prompt", type=whole_count, default=512, help="tokens of a prompt (default 512)")
    parser.add_argument(
        "--output", type=whole_count, default=1024, help="tokens of an answer, on average (default 1024)"
    )
    parser.add_argument("--longest", type=whole_count, help="tokens of a step's longest answer (default: --output)")
    parser.add_argument(
        "--beta", type=number(), default=0, help="weight of the KL term: above 0, a reference runs, too"
    )
    parser.add_argument("--top", type=integer(1), default=6, help="how many divisions to show (default 6)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    asked = PosttrainJob(
        get(args.model), args.prompts, args.group, args.prompt, args.output, args.longest or 0, int(args.beta > 0)
    )
    hardware = chip(args.chip)
    hardware.flops(asked.dtype)
    try:
        found = divisions(asked, hardware, args.chips)
    except ValueError as error:
        print(json.dumps({"error": str(error)}), file=sys.stderr) if args.json else complain(f"no plan: {error}")
        return 1
    print(json.dumps(as_dict(found), indent=1) if args.json else report(found, asked, hardware, args.chips, args.top))
    return 0
