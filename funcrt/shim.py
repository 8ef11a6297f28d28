"""Gives a BLAS whose symbols carry a prefix the plain names that MLX looks for.

The PyPI package scipy-openblas32 exports `scipy_cblas_sgemm`, MLX calls `cblas_sgemm`. The shim is
a few hundred bytes of assembly: each plain name jumps through a table that this process fills with
addresses. A jump leaves registers and stack as they are, so no signature needs to be known. The
table, instead of linking against the prefixed library, keeps the compiled file independent of where
that library lies, and keeps the library's own symbols out of the global scope: SciPy's bundled copy
has the same names.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from funcrt.errors import FuncrtError

_TABLE = "funcrt_blas_table"
_JUMPS = {
    "x86_64": "jmp *table+{offset}(%rip)",
    # x16 is the register that the ABI gives to such veneers
    "aarch64": "adrp x16, table+{offset}\n ldr x16, [x16, #:lo12:table+{offset}]\n br x16",
}


class ShimError(FuncrtError, OSError):
    """The shim cannot be compiled or loaded here."""


def load_shim(targets: Mapping[str, int]) -> Path:
    """Define each name of `targets` in the process's global scope as a jump to its address.

    Compiles once per set of names and machine, into the user's cache folder.

    Args:
        targets: plain function name to the address of the function to run.

    Returns:
        The file of the shim.

    Raises:
        ShimError: unknown machine, no working C compiler, or no folder to load code from.
    """
    source = make_source(list(targets))
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    problem = "no folder"
    for make_folder in (_cache_folder, _temporary_folder):
        try:
            with make_folder() as folder:
                file = folder / f"blas-{platform.machine()}-{digest}.so"
                _open(file, source, targets)
                return file
        except ShimError:
            raise
        except (OSError, RuntimeError) as error:  # read-only, full, noexec, no home folder
            problem = str(error)
    raise ShimError(f"a small library for the BLAS could not be written or loaded: {problem}")


def make_source(names: list[str]) -> str:
    """Return the assembly of the shim for these names on this machine.

    Raises:
        ShimError: unknown machine.
    """
    machine = platform.machine()
    if machine not in _JUMPS:
        known = ", ".join(_JUMPS)
        raise ShimError(f"no BLAS shim for machine {machine!r}, only for {known}")
    lines = [".text"]
    for i, name in enumerate(names):
        jump = _JUMPS[machine].format(offset=8 * i)
        lines += [
            f".globl {name}",
            f".type {name}, %function",
            ".balign 16",
            f"{name}:",
            f" {jump}",
        ]
    # Two labels: the hidden one can be addressed relative to the code, the global one can be found.
    lines += [".bss", ".balign 8", f".globl {_TABLE}", f".type {_TABLE}, %object"]
    lines += [f"{_TABLE}:", "table:", f" .zero {8 * len(names)}"]
    lines += ['.section .note.GNU-stack, "", %progbits', ""]
    return "\n".join(lines)


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
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".build-") as build:
        assembly, library = Path(build, "shim.s"), Path(build, "shim.so")
        assembly.write_text(source)
        problem = "no C compiler found (cc, gcc or clang)"
        for compiler in _find_compilers():
            command = [*compiler, "-shared", "-nostdlib", "-o", str(library), str(assembly)]
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
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():  # unset, or to be ignored by the XDG specification
        folder = Path("~/.cache").expanduser()
    folder = folder / "funcrt" / "blas"
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
