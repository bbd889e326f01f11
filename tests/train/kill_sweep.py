"""Kills (-9) of a real run at random moments of its saving, and resumptions. Not part of the suite:

    python tests/train/kill_sweep.py --kills 50 --out kills.jsonl

A run that saves after every step is killed, resumed, killed again. Each resumption must begin right after the last step
that was complete before, and every loss must be bitwise that of a run that was never killed. Results are added to
--out, line by line: the same command goes on after an interruption.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from runs import command, records, write_text

from scaling.common.console import Parser
from scaling.train import checkpoint

OPTIONS = ["--mesh", "X=2", "--batch", "4", "--seq", "32", "--schedule", "constant", "--eval-every", "0"]
OPTIONS += ["--guard-every", "0"]


def killed(folder: Path, draw: random.Random) -> dict:
    """One kill, at a random moment after this start's first step: what was complete before and after it, what ran."""
    out, log = folder / "run", folder / "log"
    before = max(checkpoint.complete(out), default=0)
    with open(log, "w") as said:
        more = ["--resume"] if before else []
        process = subprocess.Popen(
            command(folder, "run", *OPTIONS, "--steps", "100000", "--save-every", "1", *more),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    while "\nstep " not in log.read_text() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(draw.uniform(0, 1.5))
    finished = checkpoint.complete(out)
    writing = any(path.name.startswith(".step") for path in out.iterdir())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    ran = [(each["step"], each["loss"]) for each in records(out) if each["step"] > before]
    first = int(log.read_text().partition("\nstep ")[2].partition("/")[0])
    left = max(checkpoint.complete(out), default=0)
    good = left >= max(finished, default=0) and first == before + 1
    return {"resumed_after": before, "first_step": first, "left": left, "writing": writing, "good": good, "ran": ran}


def main() -> int:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("kills.jsonl"))
    args = parser.parse_args()
    known = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    folder = Path(known[0]["folder"]) if known else Path(tempfile.mkdtemp(prefix="kills-"))
    write_text(folder)
    (folder / "run").mkdir(exist_ok=True)
    for number in range(len(known), args.kills):
        known.append({"kill": number, "folder": str(folder)} | killed(folder, random.Random(number)))
        with args.out.open("a") as out:
            out.write(json.dumps(known[-1]) + "\n")
        print(json.dumps({key: value for key, value in known[-1].items() if key != "ran"}), flush=True)
    ran = [(step, loss) for each in known for step, loss in each["ran"]]
    whole = command(folder, "whole", *OPTIONS, "--save-every", "0", "--steps", str(max(step for step, _ in ran)))
    subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)
    wanted = {each["step"]: each["loss"] for each in records(folder / "whole")}
    other = [step for step, loss in ran if loss != wanted[step]]
    right, writing = sum(each["good"] for each in known), sum(each["writing"] for each in known)
    print(f"{right} of {len(known)} kills left the last finished save, {writing} of them while one was being written; "
          f"{len(ran)} steps run, {len(other)} with another loss than in one run of {len(wanted)}")  # fmt: skip
    return 0 if right == len(known) and not other else 1


if __name__ == "__main__":
    sys.exit(main())
