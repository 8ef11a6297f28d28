"""A small compiled library that stands between MLX and a BLAS, for two reasons.

*Names.* The PyPI package scipy-openblas32 exports `scipy_cblas_sgemm`, MLX calls `cblas_sgemm`.
Each plain name is a jump through a table that this process fills with addresses; a jump leaves
registers and stack as they are, so no signature needs to be known. The table, instead of linking
against the prefixed library, keeps the compiled file independent of where that library lies, and
keeps the library's own symbols out of the global scope: SciPy's bundled copy has the same names.

*Products with few rows* (`shim.c`). OpenBLAS on x86-64 packs the whole matrix of weights for every
product, which takes as long as multiplying 40 rows, and eight times as long as one. Up to 128 rows
are therefore multiplied as they are by weights `[n, k]`, n a multiple of 4 and k of 16, where the
machine has AVX2 or AVX-512, and 2 to 8 rows, which queries of one token are that share a head, by
`[k, n]`, values of up to 256 columns; each row is bit for bit what it is alone. Other products with
one row go to `cblas_sgemv`, which packs nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from funcrt.errors import FuncrtError
from funcrt.user_cache import user_cache

_TABLE = "funcrt_blas_table"
CODE = Path(__file__).with_suffix(".c")
# What that calls of the library, under these names in C.
_CALLED = {"GEMM": "cblas_sgemm", "GEMV": "cblas_sgemv", "THREADS": "openblas_get_num_threads"}
EXTRA = ("cblas_sgemv", "openblas_get_num_threads")  # of these, what MLX does not call itself
_JUMPS = {
    "x86_64": "jmp *.Ltable+{offset}(%rip)",
    # x16 is the register that the ABI gives to such veneers
    "aarch64": "adrp x16, .Ltable+{offset}\n ldr x16, [x16, #:lo12:.Ltable+{offset}]\n br x16",
}


class ShimError(FuncrtError, OSError):
    """The shim cannot be compiled or loaded here."""


def load_shim(targets: Mapping[str, int]) -> Path:
    """Define each name of `targets` in the process's global scope, to run what is at its address.

    Compiles once per set of names and machine, into the user's cache folder.

    Args:
        targets: plain function name to address; `cblas_sgemm` and those of `EXTRA` must be among
            them.

    Returns:
        The file of the shim.

    Raises:
        ShimError: unknown machine, no working C compiler, or no folder to load code from.
    """
    source = make_source(list(targets))
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    problem = ""
    for make_folder in (_cache_folder, _temporary_folder):
        try:
            with make_folder() as folder:
                file = folder / f"shim-{_machine()}-{digest}.so"
                _open(file, source, targets)
                return file
        except ShimError:
            raise
        except (OSError, RuntimeError) as error:  # read-only, full, noexec, no home folder
            problem = str(error)
    raise ShimError(f"a small library for the BLAS could not be written or loaded: {problem}")


def make_source(names: list[str]) -> str:
    """Return the C source of the shim for these names on this machine.

    Raises:
        ShimError: unknown machine.
    """
    machine = _machine()
    if machine not in _JUMPS:
        known = ", ".join(_JUMPS)
        raise ShimError(f"no BLAS shim for machine {machine!r}, only for {known}")
    # Two labels: the local one can be addressed relative to the code, the global one can be found.
    lines = [".bss", ".balign 8", f".globl {_TABLE}", f".type {_TABLE}, %object"]
    lines += [f"{_TABLE}:", ".Ltable:", f" .zero {8 * len(names)}", ".text"]
    for i, name in enumerate(names):
        if name not in _CALLED.values():
            jump = _JUMPS[machine].format(offset=8 * i)
            lines += [f".globl {name}", f".type {name}, %function", ".balign 16", f"{name}:", jump]
    assembly = "\n".join(f"    {json.dumps(line + chr(10))}" for line in lines)
    places = {macro: names.index(name) for macro, name in _CALLED.items()}
    macros = [f"#define {name} {value}" for name, value in {"TABLE": _TABLE, **places}.items()]
    return "\n".join([*macros, CODE.read_text(), f"__asm__(\n{assembly});\n"])


def _open(file: Path, source: str, targets: Mapping[str, int]) -> None:
    if not _is_private(file):
        _compile(source, file)
    try:
        library = ctypes.CDLL(str(file))
    except OSError:  # a damaged cache file: make it again, once
        _compile(source, file)
        library = ctypes.CDLL(str(file))
    table = (ctypes.c_void_p * len(targets)).in_dll(library, _TABLE)
    table[:] = list(targets.values())
    ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)  # seen by others only now that it is filled


def _compile(source: str, file: Path) -> None:
    """Compile into `file` by way of a rename, so that another process never sees half of it."""
    import subprocess  # once on a machine

    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".build-") as build:
        code, library = Path(build, "shim.c"), Path(build, "shim.so")
        code.write_text(source)
        problem = "no C compiler found (cc, gcc or clang)"
        for compiler in _find_compilers():
            command = [*compiler, "-O2", "-fPIC", "-shared", "-pthread", "-o", str(library)]
            command += ["-x", "c", str(code)]  # c++ takes the file for C++ otherwise
            try:
                run = subprocess.run(
                    command, capture_output=True, text=True, timeout=60, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                problem = str(error)
                continue
            if run.returncode == 0:
                library.chmod(0o700)
                library.replace(file)
                return
            problem = f"{shlex.join(command)}: {run.stderr.strip()[:500]}"
    raise ShimError(problem)


def _find_compilers() -> Iterator[list[str]]:
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in (chosen, ["cc"], ["gcc"], ["clang"], ["c++"], ["g++"], ["clang++"]):
        if command and shutil.which(command[0]):
            yield command


@contextmanager
def _cache_folder() -> Iterator[Path]:
    folder = user_cache() / "blas"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder):
        raise PermissionError(f"{folder} belongs to, or can be written by, someone else")
    yield folder


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    # Removed at once: the loaded library stays mapped.
    with tempfile.TemporaryDirectory(prefix="funcrt-") as folder:
        yield Path(folder)


def _is_private(path: Path) -> bool:
    """Whether `path` exists, is ours and nobody else may write it: code is loaded from there."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    kind_ok = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return kind_ok and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _machine() -> str:
    return os.uname().machine  # as `platform.machine` says, which is slow to import
