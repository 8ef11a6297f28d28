"""CUDA kernels on their way from source to PTX; nothing here needs a GPU."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from funcrt.ops import kernels

import mlx.core as mx
import pytest

PTX = """
// a compiler's greeting
.version 9.3
.target sm_80
.visible .entry k(
\t.param .u64 k_param_0
)
{
\t.reg .b32 \t%r<3>;
\t.reg .b64 \t%rd<11>;
\tmov.u32 \t%r2, %ctaid.x;
\tld.param.u64 \t%rd1, [k_param_0];  // the first
\tst.global.u32 \t[%rd1+4], %r2;
\tadd.s64 \t%rd10, %rd1, 8;

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
        ".version 7.8", ".target sm_80", ".visible .entry k(", ".param .u64 p0", ")", "{",
        ".reg .b64 A,C;", ".reg .b32 B;", "mov.u32 B,%ctaid.x;", "ld.param.u64 A,[p0];",
        "st.global.u32 [A+4],B;", "add.s64 C,A,8;", "ret;", "}",
    ]  # fmt: skip


def test_only_registers_that_are_declared_by_number_are_renamed() -> None:
    body = [
        ".reg .pred %p<2>;", ".reg .b32 %r<5>;", ".reg .b64 %SP;", "mov.u64 %SP,%r1;",
        "setp.lt.s32 %p1,%r1,%tid.x;", "@!%p1 bra $L__BB0_2;", "mov.u64 %r2,%clock64;",
        "{.reg .b16 a,b; mov.b32 {a,b},%r1;}", "mma {%r2,%r3},{%r1};", "$L__BB0_2:", "ret;",
    ]  # fmt: skip
    renamed = kernels._rename_registers("\n".join((".entry k()", "{", *body, "}", "")))
    assert renamed.splitlines() == [
        ".entry k()", "{", ".reg .b32 A,C,D;", ".reg .pred B;", ".reg .b64 %SP;", "mov.u64 %SP,A;",
        "setp.lt.s32 B,A,%tid.x;", "@!B bra $L__BB0_2;", "mov.u64 C,%clock64;",
        "{.reg .b16 a,b; mov.b32 {a,b},A;}", "mma {C,D},{A};", "$L__BB0_2:", "ret;", "}",
    ]  # fmt: skip
    without = ".entry k()\n{\nret;\n}\n"
    assert kernels._rename_registers(without) == without


def test_names_of_registers_are_unique_and_short() -> None:
    names = list(islice(kernels._names(), 5000))
    assert len(set(names)) == 5000
    assert all(name[0].isupper() for name in names)
    assert max(map(len, names[:1600])) == 2


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


def test_what_mlx_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(kernels, "_compile", lambda source: source.encode())
    monkeypatch.setattr(
        mx.fast, "precompiled_cuda_kernel", lambda **given: told.append(given) or [mx.zeros((2,))]
    )
    x = mx.ones((2,), mx.bfloat16)
    for width in (4, 8):
        kernels.run(
            "double", 'extern "C" __global__ void NAME(const T* x, T* y, int n, int scale) {}',
            {"T": mx.bfloat16, "WIDTH": width, "FLAG": True}, [x], [7, 1.0],
            [((2,), mx.bfloat16)], blocks=(3, 2, 1), threads=64, shared_memory=128,
        )  # fmt: skip
    first, second = told
    source = first["compiled_source"].decode()
    assert "using T = bfloat;\nconstexpr int WIDTH = 4;\nconstexpr int FLAG = 1;" in source
    assert f"void {first['name']}(const T* x" in source
    assert first["name"].startswith("funcrt_double_")
    assert first["name"] != second["name"]  # MLX may know kernels by their names alone
    assert first["scalars"] == [7, 0x3F800000]
    assert first["grid"] == (192, 2, 1)
    assert first["threadgroup"] == (64, 1, 1)
    assert first["shared_memory"] == 128
    assert first["output_shapes"] == [(2,)]
    assert first["inputs"] == [x]


def test_another_target_is_another_file(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setattr(kernels, "_compile", lambda source: b"PTX")
    kernels.compile_ptx("a")
    kernels.compile_ptx.cache_clear()
    monkeypatch.setattr(kernels, "_VERSION", ".version 9.0")
    kernels.compile_ptx("a")
    assert len(list(own_cache.iterdir())) == 2
