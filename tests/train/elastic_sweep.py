"""Two nodes of torchrun on this machine, one of which is killed; and a rank that is killed. Not part of the suite:

    python tests/train/elastic_sweep.py --ranks 4 --steps 60

Prints the seconds from the kill to the next step, and how far the losses lie from those of one device.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from runs import command, options, records, write_text

from scaling.book.largest import largest
from scaling.common.console import Parser


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def node(port: int, ranks: int, script: list[str], log: Path) -> subprocess.Popen:
    """An agent and its ranks, a process group of its own."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", str(ranks),
        "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "sweep",
        "--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1", "--monitor-interval", "0.2", *script,
    ]  # fmt: skip
    with log.open("w") as out:
        # A store that nodes share keeps the address of its first round, where nobody answers a node that comes later.
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env)


def listening(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)


def wait_for(out: Path, count: int, seconds: float, agents: list) -> list[dict]:
    deadline = time.monotonic() + seconds
    while len(found := records(out)) < count:
        if time.monotonic() > deadline or all(agent.poll() is not None for agent in agents):
            raise SystemExit(f"only {len(found)} of {count} steps: see the logs in {out.parent}")
        time.sleep(0.05)
    return found


def descendants(pid: int) -> list[int]:
    """The processes below this one, by /proc."""
    below = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        below.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        children = below.get(todo.pop(), [])
        found += children
        todo += children
    return found


def main() -> int:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="of a node")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kill", default="node", choices=("node", "rank"))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    write_text(folder)
    common = ["--batch", "8", "--seq", "32", "--warmup", "5", "--eval-every", "0", "--save-every", "5"]
    common += ["--guard-every", "10", "--steps", str(args.steps)]
    subprocess.run(command(folder, "one", *common), check=True, stdout=subprocess.DEVNULL)
    out, port = folder / "two", free_port()
    mesh = f"P=2,X={args.ranks // 2},Y=2"
    script = ["-m", "scaling.train", *options(folder, "two", *common, "--mesh", mesh, "--resume")]
    agents = [node(port, args.ranks, script, folder / "node-0.log")]
    listening(port)  # this node hosts the rendezvous
    agents.append(node(port, args.ranks, script, folder / "node-1.log"))
    try:
        before = len(wait_for(out, 8, 180, agents))
        if args.kill == "node":  # the one that does not host the rendezvous
            for pid in [agents[1].pid, *descendants(agents[1].pid)]:
                os.kill(pid, signal.SIGKILL)
        else:
            os.kill(descendants(agents[1].pid)[-1], signal.SIGKILL)
        killed = time.monotonic()
        while time.monotonic() - killed < 0.3:  # what was under way when it was killed
            before, _ = max(before, len(records(out))), time.sleep(0.05)
        wait_for(out, before + 1, 90, agents[:1])
        print(f"from the kill to the next step: {time.monotonic() - killed:.1f} s", flush=True)
        agents[0].wait(300)
    finally:
        for agent in agents:
            for pid in [*descendants(agent.pid), agent.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    wanted = {each["step"]: each["loss"] for each in records(folder / "one")}
    worst = largest(abs(each["loss"] - wanted[each["step"]]) / wanted[each["step"]] for each in records(out))
    last = records(out)[-1]["step"]
    print(
        f"{len(records(out))} steps run, the last is {last}; largest difference from one device {worst:.1e} of the loss"
    )
    return 0 if last == args.steps and worst < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
