import json

import pytest

from scaling.configs import get
from scaling.hardware import chip
from scaling.plan import Job, guide
from scaling.plan.__main__ import main, mesh, parse_count


def command(capsys, *arguments):
    code = main(list(arguments))
    return code, capsys.readouterr()


POD = ["--model", "llama3-70b", "--chip", "v5p", "--chips", "8960", "--batch", "4M"]


def test_command(capsys):
    code, out = command(capsys, *POD, "--json")
    got = json.loads(out.out)
    assert code == 0
    assert got["fits"]
    assert got["closed_form"]["X_opt"] == pytest.approx(1618, rel=1e-3)
    assert got["closed_form"]["compute_bound"] == "FSDP+TP"
    assert got["closed_form"]["mixed_threshold"] == pytest.approx(113, abs=1)
    assert got["at_mfu"]["dollars"] == pytest.approx(got["at_mfu"]["days"] * 24 * 8960 * 4.2)
    best = got["best"]
    assert best["bound_seconds"] <= best["forecast_seconds"] == pytest.approx(sum(best["forecast"].values()))
    assert got["at_mfu"]["seconds"] * 0.4 == pytest.approx(best["mfu"] * best["forecast_seconds"])
    parts = {k: -v if k == "apart" else v for k, v in best["memory"].items() if k != "total"}
    assert best["memory"]["total"] == pytest.approx(sum(parts.values()))
    code, out = command(capsys, *POD)
    assert code == 0
    assert "X_opt = 1,619 (FSDP), 5.5 (TP)" in out.out
    assert "Bound:" in out.out
    assert "Forecast:" in out.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        POD, [*POD[:4], "--chips", "35840", "--batch", "4M"],
        ["--model", "llama3-405b", "--chip", "h100", "--chips", "1024", "--batch", "4M", "--seq", "8192"],
        ["--model", "mixtral-8x7b", "--chip", "gb200", "--chips", "96", "--batch", "2M", "--dtype", "fp8"],
        ["--model", "llama3-405b", "--chip", "h100", "--chips", "64", "--batch", "1M"],
    ],
)  # fmt: skip
def test_output_is_at_most_100_columns_wide(capsys, arguments):
    _, out = command(capsys, *arguments)
    assert max(len(line) for line in out.out.splitlines()) <= 100


def test_gpus_have_closed_forms_and_caveats(capsys):
    _, out = command(capsys, "--model", "llama3-405b", "--chip", "h100", "--chips", "1024", "--batch", "1M")
    assert "data parallelism across nodes needs 2,475" in out.out
    assert "TP in a node stays compute-bound up to 24.2 ways" in out.out


def test_command_when_nothing_fits(capsys):
    arguments = ["--model", "llama3-70b", "--chip", "h100", "--chips", "8", "--batch", "512k"]
    code, out = command(capsys, *arguments)
    assert code == 1
    assert "Nothing fits" in out.out
    assert "chips: " in out.out
    assert "8-bit optimizer states" in out.out
    code, out = command(capsys, *arguments, "--json")
    need = json.loads(out.out)["help"]
    assert code == 1
    assert need["missing"] == pytest.approx(need["held"] - 0.9 * 80e9)


def test_no_plan_says_why(capsys):
    code, out = command(
        capsys, "--model", "llama3-8b", "--chip", "h100", "--chips", "4096", "--batch", "4096", "--mesh", "data=4096"
    )
    assert code == 1
    assert "no plan: no mesh of 4,096 h100 suits llama3-8b: more replicas than the 1 sequences" in out.err


def test_command_errors(capsys):
    for arguments, message in (
        (["--model", "llama9", "--chip", "v5p"], "unknown model"),
        (["--model", "llama3-8b", "--chip", "v9"], "unknown chip"),
        (["--model", "llama3-8b", "--chip", "v5e", "--dtype", "fp8"], "no FLOPs/s for fp8"),
    ):
        code, out = command(capsys, *arguments, "--chips", "16", "--batch", "1M")
        assert code == 2
        assert message in out.err
    for wrong in (
        ["--mfu", "2"],
        ["--headroom", "0"],
        ["--batch", "1e400"],
        ["--batch", "4x"],
        ["--mesh", "seq=2"],
        ["--dtype", "int4"],
    ):
        with pytest.raises(SystemExit) as error:
            main([*POD, *wrong])
        assert error.value.code == 2
    assert parse_count("4M") == 4 * 2**20
    assert mesh("tensor=8, pipe=16") == (("tensor", 8), ("pipe", 16))


# --- The guide


def test_the_ladder_is_climbed_as_the_model_grows():
    h100, taken = chip("h100"), []
    for L in (2, 20, 32, 60):
        job = Job(get("llama3-8b").with_(L=L, V=32000), 32 * 2048, 2048)
        taken.append(guide.choose_rung(guide.climb(job, h100, 8)).rung.name)
    assert taken[0] == "DDP"
    assert taken[1] in ("DDP", "FSDP")
    assert taken[2:] == ["FSDP", "FSDP"]
    job = Job(get("llama3-70b"), 32 * 8192, 8192)
    names = [step.rung.name for step in guide.climb(job, h100, 32) if step.fits]
    assert names[0].startswith("FSDP + checkpointing")
    one = Job(get("llama3-8b").with_(L=2, V=32000), 32 * 2048, 2048)
    assert guide.choose_rung(guide.climb(one, h100, 1)).rung.name == "one GPU"


def test_guide_command(capsys):
    code, out = command(capsys, "guide", "--model", "llama3-8b", "--gpu", "h100", "--gpus", "8")
    assert code == 0
    assert "Take: FSDP" in out.out
    assert max(len(line) for line in out.out.splitlines()) <= 100
    code, out = command(capsys, "guide", "--model", "llama3-8b", "--memory", "24GB", "--gpus", "2")
    assert code == 1
    assert "Nothing fits" in out.out
    assert "8-bit Adam" in out.out
    code, out = command(capsys, "guide", "--model", "llama3-8b", "--gpu", "v5p")
    assert code == 2
    assert "is a tpu" in out.err
    code, out = command(capsys, "guide", "--model", "llama3-8b", "--gpu", "h100", "--gpus", "64", "--sequences", "8")
    assert code in (0, 1, 2)
