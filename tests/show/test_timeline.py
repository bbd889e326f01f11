"""A timeline as a trace that a browser shows."""

import json

from scaling.schedules import make
from scaling.schedules.simulator import Times, simulate
from scaling.show.timelines import write_chrome


def test_chrome_trace(tmp_path):
    timeline = simulate(make("gpipe", 2, 3), Times(hop=1))
    write_chrome(tmp_path / "trace.json", timeline, timeline)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["gpipe", "rank 0", "rank 1"] * 2
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert len(spans) == len(timeline.spans)
    forward = next(e for e in spans if e["name"] == "Forward 2" and e["tid"] == 1)
    assert (forward["ts"], forward["dur"], forward["args"]) == (4e6, 1e6, {"stage": 1, "microbatch": 2})
