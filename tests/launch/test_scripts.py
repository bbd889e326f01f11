"""Scripts that `launch.start` runs, under python and torchrun: what they print, how they end, what ends with them."""

import contextlib
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from machine import SOON, Forked, all_ended, running
from torch.distributed import run as torchrun

from scaling import launch
from scaling.launch.ranks import WAIT, WAIT_OF_MANY
from scaling.spec import ShardingError

SCRIPT = f"""
import os, sys, time
sys.path[:0] = {[str(Path(launch.__file__).parents[2])]!r}
import torch
from scaling.collectives import all_reduce
from scaling.launch import parse_mesh, start

def main(mesh, how):
    sys.stdout.write(f"pid {{os.getpid()}} rank {{mesh.rank}}\\n")
    sys.stdout.flush()
    if how == "wait":
        time.sleep(600)
    if how == "raise" and mesh.rank == mesh.size() - 1:
        raise ValueError("boom")
    if how == "hang":
        time.sleep(60)
    if how == "leave" and mesh.rank == mesh.size() - 1:
        sys.exit(0)
    if how == "early" and mesh.rank == mesh.size() - 1:
        return 0.0
    return all_reduce("A[] {{U_X}} -> A[]", torch.ones(()), mesh).item()

if __name__ == "__main__":
    result = start(main, {{"X": int(sys.argv[2])}}, sys.argv[1], timeout=float((sys.argv + ["60"])[3]))
    if int(os.environ.get("RANK", 0)) == 0:
        print("result", result)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO_RANKS = [*TORCHRUN, "--nproc-per-node", "2"]


def as_main(path: Path, args) -> None:
    sys.argv = [str(path), *args]
    runpy.run_path(str(path), run_name="__main__")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Start the script with some arguments: its process, forked from this one where there is no command."""
    folder, begun = tmp_path_factory.mktemp("script"), []
    (folder / "script.py").write_text(SCRIPT)

    def begin(*args, command=()):
        if not command:
            begun.append(Forked(lambda: as_main(folder / "script.py", args)))
            return begun[-1]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        where = {"cwd": folder, "env": environment, "start_new_session": True}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background would ignore it
        begun.append(subprocess.Popen([*command, str(folder / "script.py"), *args], **where, **streams))
        return begun[-1]

    yield begin
    for process in begun:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def pids_in(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+) rank", text)]


def failure_of(process) -> str:
    """What a process has printed that ends with exit code 1, and takes its ranks with it."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1, out
    assert all_ended(pids_in(out))
    return out


@pytest.fixture
def as_script():
    """As `start` finds it in a script; it handles SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def test_a_script_gets_the_result_of_rank_0(as_script):
    assert launch.start(lambda mesh, a: (mesh.rank, a), {"X": 2}, "a") == (0, "a")


def test_a_mesh_that_is_none_ends_a_script_with_its_rule_alone(as_script):
    with pytest.raises(SystemExit) as end:
        launch.start(print, {"X": 0})
    assert end.value.code == "ShardingError: mesh axis X has size 0\n  fix: give an int of at least 1"


@pytest.mark.parametrize(
    ("rank", "error", "waits"),
    [
        ("1", ValueError("boom"), False),
        ("0", ShardingError("a line that is none"), False),
        ("1", ShardingError("a line that is none"), True),  # rank 0 says the same
        ("0", RuntimeError("Connection closed by peer"), True),  # the peer's end is the cause
    ],
)
def test_a_rank_of_torchrun_with_nothing_new_to_say_lets_the_others_end_first(
    rank, error, waits, as_script, monkeypatch
):
    """And is then ended itself, by SIGTERM."""
    slept = []

    def fail(*args, **options):
        raise error

    monkeypatch.setattr("scaling.launch.ranks.Mesh", fail)
    monkeypatch.setattr("scaling.launch.ranks.time", SimpleNamespace(sleep=slept.append))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for here in ("2", "1"):  # ranks on this node
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": here}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(type(error)):
            launch.start(print, {"X": 2})
    assert slept == ([WAIT, WAIT_OF_MANY] if waits else [])
    assert signal.getsignal(signal.SIGTERM) == (signal.SIG_DFL if waits else signal.SIG_IGN)


@pytest.mark.slow
def test_a_script_with_a_failing_rank_prints_its_traceback_alone(script):
    out = failure_of(script("raise", "4"))
    assert out.count("Traceback") == 1
    assert "RankError: rank 3 of 4 raised:\nTraceback" in out
    assert "ValueError: boom" in out


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_is_ended_takes_its_ranks_with_it(script, how):
    process = script("wait", "3")
    pids = [int(process.stdout.readline().split()[1]) for _ in range(3)]
    assert all(map(running, pids))
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # a terminal's Ctrl-C goes to all
    else:
        os.kill(process.pid, how)
    began = time.monotonic()
    out, _ = process.communicate(timeout=30)
    assert time.monotonic() - began < SOON
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[how]
    assert "Traceback" not in out
    assert all_ended(pids)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("world", "command"), [(3, TORCHRUN), (2, TWO_RANKS)])
def test_torchrun_s_ranks_are_the_mesh_and_those_that_a_bare_one_starts(script, world, command):
    process = script("run", str(world), command=command)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert sorted(out.splitlines())[-1] == f"result {world}.0"
    assert (len(pids_in(out)), "Warning" in out) == (world, False)


@pytest.mark.sweep
@pytest.mark.slow
def test_killing_a_bare_torchrun_leaves_nothing_behind(script):
    process = script("wait", "2", command=TORCHRUN)
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    assert all(map(running, pids))
    process.kill()
    assert all_ended(pids)


@pytest.mark.slow
def test_torchrun_blames_the_rank_that_failed_and_shows_its_traceback(script, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ["--nproc-per-node", "2", str(tmp_path / "script.py"), "raise", "2"]
    out = failure_of(Forked(lambda: torchrun.main(arguments)))
    cause = out.partition("Root Cause")[2]
    assert "rank      : 1 " in cause
    assert "ValueError: boom" in cause


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [("early", "rank 1: the end of the run\n"), ("leave", "rank 1: has ended\n")])
def test_torchrun_is_told_once_of_a_rank_that_ends_early(script, how, said):
    out = failure_of(script(how, "2", command=TWO_RANKS))
    cause = out.partition("Root Cause")[2]
    assert "rank 0: AllReduce A[] {U_X} -> A[] of () float32" in cause
    assert said in cause
    assert out.partition("=====")[0].count("[rank") == out.count("[rank0]: ") > 0  # one rank speaks


@pytest.mark.sweep
@pytest.mark.slow
def test_ranks_of_torchrun_that_all_hang_say_where(script):
    out = failure_of(script("hang", "2", "0.5", command=TWO_RANKS))
    assert re.search(r"rank \d: this rank hangs: it has not computed for \d+ s\n  fix: ", out)
    assert re.search(r", in main\n    time.sleep\(60\)\n", out)
