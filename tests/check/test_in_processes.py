"""Many files are read on several cores: what is said is the same, in the same order."""

import pytest

from scaling.check import files

TEXT = "from scaling.collectives import einsum\n\n\ndef f(a, b):\n    return einsum({!r}, a, b)\n"


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
def test_the_same_report(tmp_path, monkeypatch, cores):
    lines = ["A[I, J] * B[J, K] -> C[I, K]", "A[I, J] * B[J, K] -> C[I, M]"]
    paths = [tmp_path / f"f{i}.py" for i in range(5)]
    for i, path in enumerate(paths):
        path.write_text(TEXT.format(lines[i % 2]) if i != 2 else "def f(:")
    wanted = files.read_files(paths)
    assert [finding.file for finding in wanted.findings] == [str(paths[i]) for i in (1, 2, 3)]
    monkeypatch.setattr(files, "FILES", 1)
    monkeypatch.setattr(files.os, "cpu_count", lambda: cores)
    assert files.read_in_processes(paths) == wanted
