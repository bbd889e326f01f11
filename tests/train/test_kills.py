"""Real runs, as users start them, that are killed while they save, or lose a node."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from runs import records, write_text

from scaling.train import checkpoint

pytestmark = pytest.mark.sweep
TRAIN = [sys.executable, "-m", "scaling.train"]
OPTIONS = "--data text.txt --seq 32 --eval-every 0"


def test_a_run_that_is_killed_while_it_saves_goes_on_with_the_same_losses():
    """-9 at random moments of a run that saves after every step."""
    write_text()
    out, log, draw, ran = Path("run"), Path("log"), random.Random(0), []
    same = [*TRAIN, *f"{OPTIONS} --batch 4 --mesh X=2 --schedule constant --guard-every 0".split()]
    for _ in range(10):
        before = max(checkpoint.complete(out), default=0)
        more = ["--steps", "100000", "--save-every", "1", *["--resume"] * bool(before)]
        with log.open("w") as said:
            process = subprocess.Popen([*same, *more], stdout=said, stderr=said, start_new_session=True)
        while "\nstep " not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 1.5))
        finished = max(checkpoint.complete(out), default=0)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert int(log.read_text().partition("\nstep ")[2].partition("/")[0]) == before + 1
        assert max(checkpoint.complete(out), default=0) >= finished
        ran += [(each["step"], each["loss"]) for each in records(out) if each["step"] > before]
    subprocess.run([*same, *f"--out whole --save-every 0 --steps {max(ran)[0]}".split()], check=True)
    wanted = {each["step"]: each["loss"] for each in records("whole")}
    assert [(step, wanted[step]) for step, _ in ran] == ran


def node(port: int, run: str, log: str) -> subprocess.Popen:
    """An agent of torchrun and its four ranks, a process group of its own."""
    started = (
        "-m torch.distributed.run --nnodes 1:2 --nproc-per-node 4 --max-restarts 3 --monitor-interval 0.2 "
        f"--rdzv-id sweep --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf "
        f"last_call_timeout=2,keep_alive_interval=1 -m scaling.train --out two --mesh P=2,X=2,Y=2 --resume {run}"
    ).split()
    # A store that nodes share keeps the address of its first round, where nobody answers a node that comes later.
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(log, "w") as out:
        command = [sys.executable, *started]
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env)


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have, by /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


@pytest.mark.parametrize("lost", ["node", "rank"])
def test_a_run_of_two_nodes_goes_on_when_one_is_lost(lost):
    """The losses are those of one device. Without its second node the run has half of P."""
    write_text()
    common = f"{OPTIONS} --batch 8 --warmup 5 --save-every 5 --guard-every 10 --steps 40"
    subprocess.run([*TRAIN, "--out", "one", *common.split()], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [node(port, common, "node-0.log")]
    try:
        while agents[0].poll() is None:  # until this node hosts the rendezvous
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.2)
        agents.append(node(port, common, "node-1.log"))
        deadline = time.monotonic() + 600
        while len(records("two")) < 8:
            assert time.monotonic() < deadline, "too late: see the logs beside it"
            assert any(agent.poll() is None for agent in agents), "all have ended: see the logs beside it"
            time.sleep(0.05)
        ranks = below(agents[1].pid)
        for pid in [agents[1].pid, *ranks] if lost == "node" else ranks[-1:]:
            os.kill(pid, signal.SIGKILL)
        agents[0].wait(300)
    finally:
        for pid in [pid for agent in agents for pid in (*below(agent.pid), agent.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in agents:
            agent.wait()
    losses = [[each["loss"] for each in records(name)] for name in ("two", "one")]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    if lost == "node":
        assert " on P=1, X=2, Y=2, " in Path("node-0.log").read_text()
