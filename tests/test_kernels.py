"""CUDA kernels on their way from source to PTX; nothing here needs a GPU."""

from __future__ import annotations

from pathlib import Path

from funcrt.ops import kernels

import pytest

PTX = """
// a compiler's greeting
.version 9.3
.target sm_80
.visible .entry k(
\t.param .u64 k_param_0
)
{
\tld.param.u64 \t%rd1, [k_param_0];  // the first

\tret;
}
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.compile_ptx.cache_clear()
    return tmp_path / "funcrt" / "ptx"


def test_ptx_is_short_and_no_newer_than_it_has_to_be() -> None:
    assert kernels._shorten(PTX).decode().splitlines() == [
        ".version 7.8", ".target sm_80", ".visible .entry k(", ".param .u64 k_param_0", ")", "{",
        "ld.param.u64 %rd1,[k_param_0];", "ret;", "}",
    ]  # fmt: skip


def test_a_source_is_compiled_once_for_all_processes(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    compiled: list[str] = []

    def compiler(source: str) -> bytes:
        compiled.append(source)
        return source.upper().encode()

    monkeypatch.setattr(kernels, "_compile", compiler)
    assert kernels.compile_ptx("a") == b"A"
    kernels.compile_ptx.cache_clear()  # as in another process
    assert kernels.compile_ptx("a") == b"A"
    assert kernels.compile_ptx("b") == b"B"
    assert compiled == ["a", "b"]
    assert len(list(own_cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    own_cache.parent.parent.joinpath("funcrt").write_text("not a folder")
    monkeypatch.setattr(kernels, "_compile", lambda source: b"PTX")
    assert kernels.compile_ptx("a") == b"PTX"


def test_without_a_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_find_compiler", lambda: None)
    monkeypatch.setattr(kernels, "is_on_cuda", lambda: True)
    assert not kernels.are_there()
    with pytest.raises(kernels.KernelError, match="no CUDA compiler"):
        kernels.compile_ptx("a")
