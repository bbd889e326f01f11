"""Slow, endless and several rewards at a time; runs that are stopped while they wait for rewards, and go on."""

from functools import partial
from pathlib import Path
from threading import Barrier, Event
from threading import enumerate as enumerate_threads

import pytest
from grpo import STEP, run, write_folder
from runs import records

from scaling.mesh import TIMEOUT
from scaling.posttrain.loop import LoopOptions
from scaling.posttrain.rewards import Prompt, RewardError, score_answers
from scaling.train import checkpoint


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model in the working folder, beside prompts and a reward file."""
    monkeypatch.chdir(tmp_path)
    write_folder()


ASKED = [Prompt(f"prompts.jsonl:{i}", "a", [97], {"number": i}) for i in range(9)]


def scored(score, **options) -> list[float]:
    return score_answers(score, ASKED, ["b"] * len(ASKED), options.pop("seconds", 30.0), Path("reward.py"), **options)


def test_a_reward_that_never_returns_does_not_keep_the_program_alive():
    ended = Event()
    with pytest.raises(RewardError, match=r"prompts.jsonl:0 took longer than 0.01 seconds"):
        scored(lambda *given: ended.wait(), seconds=0.01, threads=2)
    daemons = [thread.daemon for thread in enumerate_threads() if thread.name == "reward"]
    ended.set()
    assert daemons
    assert all(daemons)
    for error in (TimeoutError, KeyError):
        with pytest.raises(RewardError, match=f"raised {error.__name__}"):
            scored(partial(raising, error))


def raising(error, *given):
    raise error


@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_rewards_as_are_asked_for_are_computed_at_a_time(threads):
    """Each waits for as many others as can run, and they come back in the order of the answers."""
    together = Barrier(threads, timeout=30)

    def score(prompt, answer, row):
        together.wait()
        return row["number"] / 2

    assert scored(score, threads=threads) == [i / 2 for i in range(9)]
    together = Barrier(threads + 1, timeout=0.05)
    with pytest.raises(RewardError, match="raised BrokenBarrierError"):  # one more never comes
        scored(score, threads=threads)


def test_ranks_wait_for_each_other_as_long_as_rewards_may_take():
    """64 rewards of a minute each, 8 at a time, of which a late rank may have two steps' to compute."""
    assert LoopOptions({}, {}, seconds=60.0, threads=8, staleness=1).wait(64) == TIMEOUT + 2 * 8 * 60


@pytest.mark.slow
def test_rewards_may_take_longer_than_a_collective_waits(folder, monkeypatch):
    monkeypatch.setattr("scaling.posttrain.loop.TIMEOUT", 1.0)
    Path("late.py").write_text("import time\n\n\ndef score(*given):\n    time.sleep(0.3)\n    return 1.0\n")
    assert run(f"{STEP} --reward late.py --steps 1 --out run --train-mesh X=2") == 0


@pytest.mark.slow
def test_a_signal_saves_and_a_damaged_step_is_passed_over(folder, capfd):
    """The reward of the second step sends SIGTERM, as a scheduler does; the run goes on as if nothing had happened."""
    text = Path("reward.py").read_text()
    Path("reward.py").write_text(f"import os, signal, pathlib\n{text}\nplain = score\n\n\ndef score(*given):\n"
        "    steps = pathlib.Path('run/metrics.jsonl')\n"
        "    if pathlib.Path('ends').exists() and steps.exists() and steps.read_text().count('step') == 1:\n"
        "        pathlib.Path('ends').unlink()\n        os.kill(os.getppid(), signal.SIGTERM)\n"
        "    return plain(*given)\n")  # fmt: skip
    line = f"{STEP} --save-every 1 --train-mesh X=2 --serve-mesh Y=2 --staleness 1"
    assert run(f"{line} --steps 4 --out whole") == 0
    Path("ends").touch()
    assert run(f"{line.replace('--save-every 1', '--save-every 0')} --steps 4 --out run") == 0
    assert "stopped at step 2" in capfd.readouterr().out
    assert checkpoint.complete_steps(Path("run")) == [2]
    assert run(f"{line} --steps 3 --out run --resume") == 0
    file = Path("run/step-000003/__0.distcp")
    file.write_bytes(file.read_bytes()[:-20])
    assert run(f"{line} --steps 4 --out run --resume") == 0
    assert "warning: step 3 is damaged: " in capfd.readouterr().err
    assert [each["loss"] for each in records("run")] == [each["loss"] for each in records("whole")]
