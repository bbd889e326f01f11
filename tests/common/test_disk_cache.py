"""Results that are kept on disk: found again, not shared between arguments or versions of the sources, never wrong."""

import pytest

from scaling.common import disk_cache

CALLS = []


@disk_cache.on_disk
def doubled(x, y=0):
    CALLS.append(x)
    return {"twice": 2 * x}


@pytest.mark.parametrize("spoiled", [b"", b"not a pickle", b"cscaling.nothing\nNothing\n.", None])
def test_a_result_is_kept_for_these_arguments_and_these_sources(tmp_path, monkeypatch, spoiled):
    CALLS.clear()
    monkeypatch.setenv("SCALING_CACHE", str(tmp_path / "kept"))
    assert [doubled(3), doubled(3), doubled(4)] == [{"twice": 6}, {"twice": 6}, {"twice": 8}]
    assert CALLS == [3, 4]
    if spoiled is not None:  # a file that cannot be read is written again
        for file in disk_cache.results_folder().iterdir():
            file.write_bytes(spoiled)
        assert [doubled(3), doubled(3)] == [{"twice": 6}] * 2
        assert CALLS == [3, 4, 3]
        return
    (tmp_path / "kept" / "another program's folder").mkdir()
    for n in range(6):
        monkeypatch.setattr(disk_cache, "digest_of_sources", lambda n=n: f"{n:032x}")
        assert doubled(3) == {"twice": 6}
    assert len(CALLS) == 2 + 6
    assert len([*(tmp_path / "kept").iterdir()]) == disk_cache.KEPT + 1


@pytest.mark.parametrize("place", ["", "/dev/null/cannot be made"])
def test_without_a_folder_the_function_is_called(monkeypatch, place):
    CALLS.clear()
    monkeypatch.setenv("SCALING_CACHE", place)
    assert [doubled(3), doubled(3)] == [{"twice": 6}] * 2
    assert CALLS == [3, 3]
