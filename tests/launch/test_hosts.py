"""Two hosts, as network namespaces that one cable joins: what a survivor says when the other host is lost.

They need root and iproute2. Ranks of different hosts share no memory, so they meet by messages.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from machine import SOON, Forked, all_ended
from refused import named
from torch.func import grad

from scaling import launch
from scaling.collectives import all_reduce
from scaling.common.torchrun import as_rank
from scaling.mesh import page

CLONE_NEWNET = 0x40000000
TIMEOUT = 2.0  # seconds that a collective waits
LINE = "A[I] {U_X} -> A[I]"


def ip(*arguments: str, check: bool = True) -> bool:
    ran = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert not (check and ran.returncode), f"ip {' '.join(arguments)}: {ran.stderr}"
    return ran.returncode == 0


class Hosts:
    """Two namespaces, a and b, of addresses 10.83.0.1 and .2 on the interface `cable`."""

    def __init__(self):
        self.names, self.ranks = [f"host-{which}-{os.getpid()}" for which in "ab"], []

    def join(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        a, b = self.names
        ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for i, name in enumerate(self.names):
            ip("-n", name, "addr", "add", f"10.83.0.{i + 1}/24", "dev", "cable")
            for link in ("lo", "cable"):
                ip("-n", name, "link", "set", link, "up")

    def remove(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join()
            rank.stdout.close()
        for name in self.names:
            ip("netns", "del", name, check=False)

    def start(self, program, each: int, path: Path, **options) -> None:
        """Start so many ranks of a program on each host, and wait until all of them have done some of its work."""

        def as_one(rank: int, host: int):
            with open(f"/var/run/netns/{self.names[host]}") as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
            variables = as_rank(os.environ, rank, 2 * each, 29_500) | {"MASTER_ADDR": "10.83.0.1"}
            os.environ |= variables | {"LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each)}
            os.environ["GLOO_SOCKET_IFNAME"] = "cable"
            page._map = lambda *_: None  # hosts share no memory
            launch.start(works, {"X": 2 * each}, program, path, timeout=TIMEOUT, **options)

        for rank in range(2 * each):
            self.ranks.append(Forked(lambda rank=rank: as_one(rank, rank // each)))
        deadline = time.monotonic() + SOON
        while len(list(path.iterdir())) < 2 * each:
            assert time.monotonic() < deadline, self.ranks[0].stdout.read()
            time.sleep(0.02)


@pytest.fixture
def hosts():
    if os.getuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    found = Hosts()
    try:
        if not ip("netns", "add", found.names[0], check=False):
            pytest.skip("this machine allows no network namespaces")
        ip("netns", "del", found.names[0])
        found.join()
        yield found
    finally:
        found.remove()


def works(mesh, program, path: Path) -> None:
    """Run a program for ever; a file says when this rank is in the middle of it."""
    for step in range(1_000_000):
        program(mesh)
        if step == 3:
            (path / str(mesh.rank)).touch()


def sums(mesh):
    all_reduce(LINE, torch.ones(4), mesh)


def sums_later(mesh):
    all_reduce(LINE, torch.ones(4), mesh, async_op=True).wait()


def differentiates(mesh):
    grad(lambda x: all_reduce(LINE, x, mesh).sum())(torch.ones(4))


def unplugged(hosts: Hosts) -> None:
    ip("-n", hosts.names[1], "link", "set", "cable", "down")


def killed(hosts: Hosts) -> None:
    for rank in hosts.ranks[len(hosts.ranks) // 2 :]:
        rank.process.kill()


AT = rf", at {re.escape(__file__)}:\d+\n  "
SUM = re.escape(LINE).replace("A", "d?A")  # or its backward
LATE = rf"TimeoutError: Timed out: AllReduce:? {SUM}.*{AT}no answer from WHO within {TIMEOUT:.0f}\.\d s \("
GONE = rf"RankEnded: a rank has ended, or its host is lost: AllReduce:? {SUM}.*{AT}lost WHO after \d+\.\d s \("
ONE, TWO = (rf"{ranks} on \S+ \(10\.83\.0\.2\)" for ranks in ("rank 1", "(one of )?ranks 2, 3"))
CHECKED, UNCHECKED = {"checked": True}, {"checked": False}
# what happens to the second host, the program, ranks on each host, options, what a survivor says
LOST = named(
    """
what happens to the second host  how, the program, ranks on each host, options, what a survivor says
unplugged                  (unplugged, sums, 1, CHECKED, LATE.replace("WHO", ONE))
unplugged, two ranks each  (unplugged, sums, 2, CHECKED, LATE.replace("WHO", TWO))
unplugged, unchecked       (unplugged, sums, 1, UNCHECKED, LATE.replace("WHO", ONE))
unplugged, a Pending       (unplugged, sums_later, 1, UNCHECKED, LATE.replace("WHO", ONE))
unplugged, differentiated  (unplugged, differentiates, 1, UNCHECKED, LATE.replace("WHO", ONE))
killed                     (killed, sums, 1, CHECKED, GONE.replace("WHO", ONE))
killed, unchecked          (killed, sums_later, 1, UNCHECKED, GONE.replace("WHO", ONE))
""",
    globals(),
)


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.sweep] * (how != "unplugged")) for how in LOST])
def test_a_survivor_names_the_line_the_ranks_their_host_and_the_seconds(how, hosts, tmp_path):
    happens, program, each, options, words = LOST[how]
    hosts.start(program, each, tmp_path, **options)
    happens(hosts)
    survivor = hosts.ranks[0]
    out, _ = survivor.communicate(SOON)
    assert survivor.returncode == 1
    assert re.search(words, out), out
    lines = out[out.index("Traceback") :].splitlines()
    assert len(lines) < 40, out
    ours = str(Path(launch.__file__).parents[1])
    assert [line for line in lines if f'File "{ours}' in line and "launch/ranks.py" not in line] == [], out


SCRIPT = f"""
import sys
from pathlib import Path
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]!r}
from test_hosts import TIMEOUT, sums, works
from scaling.launch import start
if __name__ == "__main__":
    start(works, {{"X": 2}}, sums, Path(sys.argv[1]), timeout=TIMEOUT)
"""


@pytest.mark.sweep
@pytest.mark.slow
def test_the_survivor_of_a_launcher_that_is_killed(hosts, tmp_path):
    """torchrun on each host, as docs/from-laptop-to-cluster.md starts it."""
    script, done = tmp_path / "script.py", tmp_path / "done"
    script.write_text(SCRIPT)
    done.mkdir()
    begun = []
    try:
        for i, name in enumerate(hosts.names):
            rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.83.0.1:29400", f"--rdzv-conf=is_host={i == 0}"]
            where = [f"--local-addr=10.83.0.{i + 1}", "--nnodes=2", "--nproc-per-node=1", *rendezvous]
            torchrun = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *where]
            env = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            with open(tmp_path / f"out{i}", "w") as out:
                streams = {"stdout": out, "stderr": out, "start_new_session": True}
                begun.append(subprocess.Popen([*torchrun, str(script), str(done)], env=env, **streams))
        deadline = time.monotonic() + 60
        while len(list(done.iterdir())) < 2:
            assert time.monotonic() < deadline, (tmp_path / "out0").read_text()
            time.sleep(0.1)
        os.killpg(begun[1].pid, signal.SIGKILL)
        assert begun[0].wait(SOON) == 1
        said = (tmp_path / "out0").read_text()
        who = r"(rank 1 on \S+ \(10\.83\.0\.2\)|rank 1: has ended)"
        assert re.search(rf"RankEnded: a rank has ended(?s:.*){who}", said), said
    finally:
        for process in begun:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert all_ended([process.pid for process in begun])


@pytest.mark.sweep
@pytest.mark.slow
def test_hosts_that_are_20_ms_apart_are_not_lost(hosts, tmp_path):
    delay = ["netns", "exec", hosts.names[1], "tc", "qdisc", "add", "dev", "cable", "root", "netem", "delay", "20ms"]
    if not ip(*delay, check=False):
        pytest.skip("this machine has no netem")
    hosts.start(sums, 1, tmp_path)
    time.sleep(2 * TIMEOUT)
    assert [rank.returncode for rank in hosts.ranks] == [None, None]
