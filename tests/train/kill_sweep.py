"""Kills (-9) of a real run at random moments of its saving, and resumptions. Not part of the suite:

    python tests/train/kill_sweep.py --kills 50 --out kills.jsonl

A run that saves after every step is killed, resumed, killed again. Each resumption must begin no earlier than after the
last step that was complete before the kill, and every loss must be bitwise that of a run that was never killed. Results
are added to --out, line by line: the same command goes on after an interruption.
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

from scaling.common.console import Parser
from scaling.train import checkpoint


def command(folder: Path, name: str, *more: str) -> list[str]:
    options = "--batch 4 --seq 32 --steps 100000 --schedule constant --eval-every 0 --guard-every 0 --save-every 1"
    data = ["--data", str(folder / "text.txt"), "--out", str(folder / name), "--mesh", "X=2", *options.split()]
    return [sys.executable, "-m", "scaling.train", *data, *more]


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) in the order in which they were run; a line that a kill has cut short is left out."""
    path, found = folder / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found.append((record["step"], record["loss"]))
    return found


def killed(folder: Path, draw: random.Random) -> dict:
    """One kill, at a random moment after this start's first step, and what was complete before and is after it."""
    out = folder / "run"
    before, seen = checkpoint.complete(out), len(losses(out))
    with open(folder / "log", "a") as log:
        ordered = {"stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen(command(folder, "run", *(["--resume"] if before else [])), **ordered)
        while len(losses(out)) <= seen and process.poll() is None:
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 1.5))
        finished = checkpoint.complete(out)
        writing = any(path.name.startswith(".step") for path in out.iterdir())
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {
        "resumed_after": max(before, default=0),
        "first_step": losses(out)[seen][0],
        "finished": max(finished, default=0),
        "left": max(checkpoint.complete(out), default=0),
        "writing": writing,
    }


def main() -> int:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("kills.jsonl"))
    args = parser.parse_args()
    known = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    folder = Path(known[0]["folder"]) if known else Path(tempfile.mkdtemp(prefix="kills-"))
    if not known:
        (folder / "text.txt").write_text("".join(f"line {i} of {i * i % 97}\n" for i in range(20_000)))
    (folder / "run").mkdir(exist_ok=True)
    for number in range(len(known), args.kills):
        found = {"kill": number, "folder": str(folder)} | killed(folder, random.Random(number))
        good = found["left"] >= found["finished"] and found["first_step"] == found["resumed_after"] + 1
        known.append(found | {"good": good})
        with args.out.open("a") as out:
            out.write(json.dumps(known[-1]) + "\n")
        print(json.dumps(known[-1]), flush=True)
    ran = losses(folder / "run")
    whole = [*command(folder, "whole"), "--save-every", "0", "--steps", str(max(step for step, _ in ran))]
    subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)
    wanted = dict(losses(folder / "whole"))
    other = [step for step, loss in ran if loss != wanted[step]]
    right, writing = sum(each["good"] for each in known), sum(each["writing"] for each in known)
    print(f"{right} of {len(known)} kills left the last finished save, {writing} of them while one was being written; "
          f"{len(ran)} steps run, {len(other)} with another loss than in one run of {len(wanted)}")  # fmt: skip
    return 0 if right == len(known) and not other else 1


if __name__ == "__main__":
    sys.exit(main())
