"""Scripts that `launch.start` runs, under python and torchrun: what they print, how they end, what ends with them."""

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from machine import SOON, Forked, all_ended, be_rank, ranks_of_torchrun, running

from scaling import launch
from scaling.launch.ranks import WAIT, WAIT_OF_MANY
from scaling.mesh.lost import RankEnded
from scaling.spec import ShardingError

SCRIPT = f"""
import os, sys, time
sys.path[:0] = {[str(Path(launch.__file__).parents[2])]!r}
import torch
from scaling.collectives import all_reduce
from scaling.launch import start

def main(mesh, how):
    sys.stdout.write(f"pid {{os.getpid()}} rank {{mesh.rank}}\\n")
    sys.stdout.flush()
    if how == "wait":
        time.sleep(600)
    if mesh.rank < mesh.size() - 1:
        return all_reduce("A[] {{U_X}} -> A[]", torch.ones(()), mesh)
    if how == "raise":
        raise ValueError("boom")
    if how == "leave":
        sys.exit(0)

if __name__ == "__main__":
    start(main, {{"X": int(sys.argv[2])}}, sys.argv[1], timeout=float((sys.argv + ["60"])[3]))
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Start the script with some arguments: its process, forked from this one where there is no command."""
    path, begun = tmp_path_factory.mktemp("script") / "script.py", []
    path.write_text(SCRIPT)

    def begin(*args, command=()):
        def as_main():
            sys.argv = [str(path), *args]
            runpy.run_path(str(path), run_name="__main__")

        if not command:
            begun.append(Forked(as_main))
            return begun[-1]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        where = {"cwd": path.parent, "env": environment, "start_new_session": True}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background would ignore it
        begun.append(subprocess.Popen([*command, str(path), *args], **where, **streams))
        return begun[-1]

    yield begin
    for process in begun:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def failure_of(process) -> str:
    """What a process has printed that ends with exit code 1, and takes its ranks with it."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1, out
    pids = [int(pid) for pid in re.findall(r"pid (\d+) rank", out)]
    assert pids
    assert all_ended(pids), out
    return out


@pytest.fixture
def as_script():
    """As `start` finds it in a script; it handles SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def test_a_script_gets_the_result_of_rank_0_or_ends_with_the_rule_of_meshes_alone(as_script):
    assert launch.start(lambda mesh, a: (mesh.rank, a), {"X": 2}, "a") == (0, "a")
    with pytest.raises(SystemExit, match=r"^ShardingError: mesh axis X has size 0\n  fix: give an int of at least 1$"):
        launch.start(print, {"X": 0})


@pytest.mark.parametrize(
    ("rank", "error", "waits"),
    [
        (1, ValueError("boom"), False),
        (0, ShardingError("a line that is none"), False),
        (1, ShardingError("a line that is none"), True),  # rank 0 says the same
        (0, RuntimeError("Connection closed by peer"), True),  # the peer's end is the cause
    ],
)
def test_a_rank_of_torchrun_with_nothing_new_to_say_lets_others_end_first(rank, error, waits, as_script, monkeypatch):
    """And is then ended itself, by SIGTERM."""
    slept = []
    monkeypatch.setattr("scaling.launch.ranks.Mesh", Mock(side_effect=error))
    monkeypatch.setattr("scaling.launch.ranks.time", SimpleNamespace(sleep=slept.append))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for here in ("2", "1"):  # ranks on this node
        be_rank(monkeypatch, rank, 2, LOCAL_WORLD_SIZE=here, LOCAL_RANK="0")
        with pytest.raises((type(error), RankEnded)):
            launch.start(print, {"X": 2})
    assert slept == ([WAIT, WAIT_OF_MANY] if waits else [])
    assert signal.getsignal(signal.SIGTERM) == (signal.SIG_DFL if waits else signal.SIG_IGN)


@pytest.mark.slow
def test_a_script_with_a_failing_rank_prints_its_traceback_alone(script):
    out = failure_of(script("raise", "4"))
    assert out.count("Traceback") == 1
    assert re.search(r"RankError: rank 3 of 4 raised:\nTraceback(?s:.*)ValueError: boom", out)


def all_begun(process, world: int) -> list[int]:
    pids = [int(process.stdout.readline().split()[1]) for _ in range(world)]
    assert all(map(running, pids))
    return pids


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_script_that_is_ended_takes_its_ranks_with_it(script, how):
    process = script("wait", "3")
    pids = all_begun(process, 3)
    (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)  # a terminal's Ctrl-C goes to all
    assert all_ended(pids)  # soon
    out, _ = process.communicate(timeout=30)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[how]
    assert "Traceback" not in out


@pytest.mark.slow
def test_the_rank_that_failed_leaves_torchrun_its_traceback_and_the_other_waits_for_its_end(script, tmp_path):
    """Of such files torchrun's report is made. The sweeps below have it."""
    said = tmp_path / "error"
    zero, one = ranks_of_torchrun(
        lambda: script("raise", "2"), TORCHELASTIC_ERROR_FILE=str(said), TORCHELASTIC_RUN_ID="a"
    )
    failure_of(one)
    zero.process.join(1.0)
    assert running(zero.pid)
    os.kill(zero.pid, signal.SIGTERM)
    zero.communicate(SOON)
    assert zero.returncode == -signal.SIGTERM
    assert "ValueError: boom" in said.read_text()


@pytest.mark.sweep
@pytest.mark.slow
def test_killing_a_bare_torchrun_leaves_nothing_behind(script):
    pids = all_begun(process := script("wait", "2", command=TORCHRUN), 2)
    process.kill()
    process.wait()
    assert all_ended(pids)


WAITED = r"Root Cause(?s:.*)rank 0: AllReduce A\[\] {U_X} -> A\[\] of \(\) float32(?s:.*)"
HANGS = r"rank \d: this rank hangs: it has not computed for \d+ s\n  fix: (?s:.*), in main\n    time\.sleep\(600\)\n"


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["raise", "2"], r"Root Cause(?s:.*)rank      : 1 (?s:.*)ValueError: boom"),
        (["early", "2"], WAITED + "rank 1: the end of the run\n"),
        (["leave", "2"], WAITED + "rank 1: has ended\n"),
        (["wait", "2", "3"], HANGS),
    ],
    ids=["raises", "ends early", "leaves", "hangs"],
)
def test_torchrun_is_told_once_of_a_rank_that_fails_ends_early_or_hangs(script, arguments, said):
    out = failure_of(script(*arguments, command=[*TORCHRUN, "--nproc-per-node", "2"]))
    assert re.search(said, out), out
    if said.startswith(WAITED):
        assert out.partition("=====")[0].count("[rank") == out.count("[rank0]: ") > 0  # one rank speaks
