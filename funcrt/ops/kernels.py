"""CUDA kernels from their source.

MLX compiles a kernel of `mx.fast.cuda_kernel` in every process anew, for three seconds each. Here
they become PTX, which is kept on disk and in exported graphs, and which every GPU from compute
capability 8.0 on takes. NVRTC, the compiler, is the one that MLX for CUDA comes with.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import string
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import count, product
from typing import TypeAlias

from funcrt.errors import FuncrtError
from funcrt.machine import is_on_cuda
from funcrt.user_cache import user_cache, write_atomically

import mlx.core as mx

_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")  # which MLX has loaded by then
_LEAST_CAPABILITY = 8  # bfloat16, asynchronous copies, products of the tensor cores
_TARGET = f"compute_{_LEAST_CAPABILITY}0"
# Of the language of that time. Drivers refuse what says that it is newer than they are, and the
# compiler calls everything as new as itself.
_VERSION = ".version 7.8"
_TYPES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat"}
# No header: parsing CUDA's own takes longer than all the rest.
_PRELUDE = """
struct bfloat {
  unsigned short bits;
  bfloat() = default;
  __device__ explicit bfloat(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
struct half {
  unsigned short bits;
  half() = default;
  __device__ explicit half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
"""


Output: TypeAlias = tuple[tuple[int, ...], mx.Dtype]
"""Shape and dtype."""


class KernelError(FuncrtError, RuntimeError):
    """A CUDA kernel could not be compiled."""


def run(
    name: str,
    source: str,
    constants: Mapping[str, int | bool | mx.Dtype],
    inputs: Sequence[mx.array],
    scalars: Sequence[int | float],
    outputs: Sequence[Output],
    *,
    blocks: tuple[int, int, int],
    threads: int,
    shared_memory: int = 0,
) -> list[mx.array]:
    """Run a kernel, as a node of the graph.

    Args:
        name: it gets, with "funcrt_" in front.
        source: CUDA without headers, with one function `extern "C" __global__ void NAME`. The
            types `bfloat` and `half` convert to float and from it.
        constants: what the source leaves open: numbers, and types.
        inputs: pointers to arrays in row order come first among the arguments. Kernels that read
            16 bytes at once need them at multiples of that, where whole arrays begin.
        scalars: come last, after the outputs, as int; of a float its bits, see `__int_as_float`,
            since MLX refuses floats.
        outputs: shapes and dtypes.
        blocks: of the grid.
        threads: of a block.
        shared_memory: bytes, beyond what the source declares.

    Raises:
        KernelError: the source does not compile.
    """
    lines = [
        f"using {key} = {_TYPES[value]};"
        if isinstance(value, mx.Dtype)
        else f"constexpr int {key} = {int(value)};"
        for key, value in constants.items()
    ]
    source = "\n".join((_PRELUDE, *lines, source))
    name = f"funcrt_{name}_{_digest(source)[:8]}"  # MLX may know kernels by their names alone
    ptx = compile_ptx(source.replace("NAME", name))
    return mx.fast.precompiled_cuda_kernel(
        name=name,
        compiled_source=ptx,
        inputs=inputs,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        scalars=[_bits(value) if isinstance(value, float) else value for value in scalars],
        grid=(blocks[0] * threads, blocks[1], blocks[2]),
        threadgroup=(threads, 1, 1),
        shared_memory=shared_memory,
        ensure_row_contiguous=True,
    )


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _bits(value: float) -> int:
    (bits,) = struct.unpack("i", struct.pack("f", value))
    return int(bits)


@cache
def compile_ptx(source: str) -> bytes:
    """PTX of a source, from disk if it was compiled before. Raises KernelError."""
    folder = user_cache() / "ptx"
    file = folder / f"{_digest(_TARGET, _VERSION, source)}.ptx"
    try:
        return file.read_bytes()
    except OSError:
        ptx = _compile(source)
        write_atomically(file, ptx)
        return ptx


def are_there() -> bool:
    """Whether kernels can be compiled and run here; where not, plain operations do the same."""
    return is_on_cuda() and _find_compiler() is not None and _is_new_enough()


@cache
def _is_new_enough() -> bool:
    return int(mx.device_info().get("compute_capability_major", 0)) >= _LEAST_CAPABILITY


@cache
def _find_compiler() -> ctypes.CDLL | None:
    """NVRTC, if there is one."""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _compile(source: str) -> bytes:
    nvrtc = _find_compiler()
    if nvrtc is None:
        raise KernelError(f"no CUDA compiler: none of {', '.join(_LIBRARIES)} can be loaded")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={_TARGET}".encode(), b"--std=c++17"]
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        array = (ctypes.c_char_p * len(options))(*options)
        failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
        kind = "ProgramLog" if failed else "PTX"
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, text)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise KernelError(f"a CUDA kernel does not compile: {text.value.decode()}")
    return _shorten(text.value.decode())


def _shorten(ptx: str) -> bytes:
    """Without comments and spaces: MLX hashes all of it each time that the kernel runs."""
    lines = (line.partition("//")[0].strip() for line in ptx.splitlines())
    text = "\n".join(line for line in lines if line) + "\n"
    text = re.sub(r"^\.version .*$", _VERSION, text, count=1, flags=re.MULTILINE)
    text = re.sub(r"\w+_param_(?=\d)", "p", text)
    return _rename_registers(re.sub(r"[ \t]+", " ", text).replace(", ", ",")).encode()


def _rename_registers(ptx: str) -> str:
    """`%rd12` and the like as `A`, `B0`: capitals, which no instruction begins with.

    The most frequent ones get the shortest names. Declarations `.reg .b64 %rd<20>;` become lists.
    """
    declared = re.findall(r"^\.reg (\.\w+) (%\w+?)<\d+>;$", ptx, flags=re.MULTILINE)
    if not declared:
        return ptx
    types = {prefix: kind for kind, prefix in declared}
    body = re.sub(r"^\.reg \.\w+ %\w+?<\d+>;\n", "", ptx, flags=re.MULTILINE)
    register = re.compile(rf"(?:{'|'.join(map(re.escape, types))})\d+\b")
    counted = Counter(register.findall(body))
    names = dict(zip((name for name, _ in counted.most_common()), _names(), strict=False))
    lists: dict[str, list[str]] = {}
    for name, short in names.items():
        lists.setdefault(types[name.rstrip("0123456789")], []).append(short)
    told = "".join(f".reg {kind} {','.join(short)};\n" for kind, short in lists.items())
    renamed = register.sub(lambda found: names[found[0]], body)
    return renamed.replace("{\n", "{\n" + told, 1)


def _names() -> Iterator[str]:
    yield from string.ascii_uppercase
    rest = string.ascii_letters + string.digits
    for size in count(1):
        for name in product(string.ascii_uppercase, *[rest] * size):
            yield "".join(name)
