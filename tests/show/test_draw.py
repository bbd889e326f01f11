"""Pictures and traces of schedules."""

import json
import re
from dataclasses import replace

import pytest

from scaling import show
from scaling.schedules import SCHEDULES, make
from scaling.schedules.simulator import Times, simulate
from scaling.show import schedules as show_schedule
from scaling.show.timelines import draw_on, save_schedule, schedule_chart, summary, write_chrome


def test_the_chart_is_the_schedule():
    chart = schedule_chart(simulate(make("1f1b", 2, 3), Times(1, 1, 1)))
    assert chart.splitlines() == [
        "rank 0 |F0F1····B0--F2B1--··B2--|",
        "rank 1 |··F0B0--F1B1--F2B2--····|",
        "        F forward  B backward  · idle",
    ]
    line = summary(simulate(make("1f1b", 4, 8)), "units")
    assert line == "1f1b: makespan 33 units, bubble 27.3%, live activations 4, 3, 2, 1"
    with pytest.raises(ValueError, match="no computation"):
        schedule_chart(replace(simulate(make("1f1b", 2, 2)), spans=()))


def test_halves_and_chunks_have_letters_of_their_own():
    assert "F0I0F1I1F2I2W0" in schedule_chart(simulate(make("zb-h1", 3, 4))).splitlines()[2]
    assert "F0f0F1f1" in schedule_chart(simulate(make("dualpipev", 2, 4))).splitlines()[1]


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_rows_are_aligned_and_as_wide_as_asked(name):
    timeline = simulate(make(name, 4, 8), Times(1.25, 1, 0.75, hop=0.1))
    rows = schedule_chart(timeline, width=90).splitlines()[:-1]
    assert [len(row) for row in rows] == [len("rank 0 ||") + 90] * 4
    coloured = schedule_chart(timeline, width=90, colour=True).splitlines()[:-1]
    plain = [re.sub("\x1b\\[[0-9;]*m", "", row) for row in coloured]
    assert [row.replace(" ", "-")[7:] for row in plain] == [row[7:] for row in rows]


@pytest.mark.slow
def test_files(tmp_path):
    timelines = [simulate(make(name, 2, 4)) for name in ("gpipe", "dualpipev")]
    for suffix, start in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        save_schedule(tmp_path / f"chart.{suffix}", *timelines)
        assert (tmp_path / f"chart.{suffix}").read_bytes().startswith(start)


def test_show(capsys, tmp_path):
    picture, trace = tmp_path / "a.svg", tmp_path / "a.json"
    options = ["--stages", "4", "--microbatches", "8", "--plot", str(picture), "--trace", str(trace)]
    assert show.main(["schedule", "1f1b", *options]) == 0
    shown = capsys.readouterr().out
    assert "bubble 27.3%" in shown
    assert "closed form 9 = simulated 9" in shown
    assert picture.exists()
    assert trace.exists()

    assert show_schedule.main(["all", "--stages", "2", "--microbatches", "3", "--times", "1,2,1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("rank 1 |") == 4
    assert "interleaved: 3 microbatches are not a multiple of 2 stages" in shown.err
    assert show_schedule.main(["dualpipev", "--stages", "4", "--microbatches", "4"]) == 2
    assert show_schedule.main(["gpipe", "--split", "--hop", "1/2"]) == 0


def test_chrome_trace(tmp_path):
    timeline = simulate(make("gpipe", 2, 3), Times(hop=1))
    write_chrome(tmp_path / "trace.json", timeline, timeline)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["gpipe", "rank 0", "rank 1"] * 2
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert len(spans) == len(timeline.spans)
    forward = next(e for e in spans if e["name"] == "Forward 2" and e["tid"] == 1)
    assert (forward["ts"], forward["dur"], forward["args"]) == (4e6, 1e6, {"stage": 1, "microbatch": 2})


@pytest.mark.parametrize("shown", [False, True])
def test_on_a_page_it_is_text_or_a_picture(shown):
    said = []

    class Page:
        columns = 70

        def picture(self, name, make):
            said.append(name)
            return shown

        def say(self, text):
            said.append(text)

    timeline = simulate(make("1f1b", 2, 3))
    draw_on(Page(), timeline, "s")
    text = f"{summary(timeline, 's')}\n{schedule_chart(timeline, width=60)}"
    assert said == ["1f1b"] + [text] * (not shown)
