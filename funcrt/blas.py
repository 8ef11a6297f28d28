"""Chooses the BLAS that MLX computes with on a Linux CPU, before MLX is loaded.

MLX's Linux wheel links the reference BLAS, whose matrix products are up to sixty times slower
than they could be. The dynamic linker binds MLX's calls to what comes first in the process's global
scope, so a fast library loaded there before `mlx.core` serves them instead. Which one:

1. the environment variable FUNCRT_BLAS: a library file, `system`, `scipy`, or `none`;
2. OpenBLAS, MKL or BLIS where the system's loader (or this Python's prefix) has one;
3. the PyPI package scipy-openblas32, by way of `funcrt.shim`;
4. otherwise MLX's own, with a warning.

On macOS (Accelerate) and with MLX's CUDA wheel there is nothing to do. This module must not import
mlx.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from funcrt import elf, shim
from funcrt.errors import FuncrtError

Source = Literal["env", "system", "scipy-openblas32", "builtin", "not needed"]

_VARIABLE = "FUNCRT_BLAS"
_REQUIRED = ("cblas_sgemm", "cblas_sgemv", "cblas_dgemm", "cblas_cgemm")
_PREFIX = "scipy_"
# Sonames, as `ctypes.util.find_library` starts ldconfig and gcc. Fedora's `p` is the threaded one.
_SYSTEM = (
    "libopenblasp.so.0", "libopenblas.so.0", "libopenblas.so",
    "libmkl_rt.so.3", "libmkl_rt.so.2", "libmkl_rt.so",
    "libblis.so.4", "libblis.so",
)  # fmt: skip
_WIDE = "is built for 64-bit integers; MLX needs 32-bit ones"
_ADVICE = (
    "Install one: `pip install scipy-openblas32` (needs a C compiler once) "
    "or `apt-get install libopenblas0-pthread`"
)


class BlasError(FuncrtError, OSError):
    """The BLAS that FUNCRT_BLAS asks for cannot be used."""


@dataclass(frozen=True)
class Blas:
    """The library that serves MLX's matrix products on the CPU, and where it came from."""

    name: str
    version: str
    path: Path | None
    source: Source


class _Kind(NamedTuple):
    name: str
    version: str
    problem: str = ""  # why MLX cannot use it


def check_backend() -> None:
    """Raise ImportError where MLX has no library, as on Linux after a bare `pip install mlx`."""
    library = _find_mlx()
    if library is None or library.name == "libmlx.so":
        return
    if b"libmlx.so" in library.read_bytes():  # it is not a static build: the rest is missing
        raise ImportError(
            "MLX is installed without a backend: pip install 'funcrt[cpu]', "
            "or 'funcrt[cuda]' for an NVIDIA card"
        )


@functools.cache
def load() -> Blas:
    """Choose the BLAS and put it before MLX's own. Later calls return the same answer.

    Warns once if the reference BLAS is what MLX will use.

    Raises:
        BlasError: FUNCRT_BLAS names something that cannot be used.
    """
    library = _find_mlx()
    if library is None:
        return Blas("Accelerate" if sys.platform == "darwin" else "none", "", None, "not needed")
    needed, cuda = elf.read_needs(library)
    if cuda or "cblas_sgemm" not in needed:
        return Blas("CUDA" if cuda else "none", "", None, "not needed")
    if "mlx.core" in sys.modules:
        return _report_bound(library)
    request = os.environ.get(_VARIABLE, "")
    if request == "none":
        return _warn_reference(f"{_VARIABLE}=none asks for it")
    if hasattr(ctypes.CDLL(None), _REQUIRED[0]):
        return _accept_present(request)
    if request:
        return _load_requested(request, needed)
    found = _load_system(needed)
    if found is not None:
        return found
    try:
        return _load_scipy(needed)
    except (BlasError, shim.ShimError) as error:
        return _warn_reference(f"no OpenBLAS, MKL or BLIS found, and {error}. {_ADVICE}")


def describe() -> str:
    """Say in one line which BLAS is in use, e.g. `OpenBLAS 0.3.30 (scipy-openblas32)`."""
    chosen = load()
    text = f"{chosen.name} {chosen.version}".rstrip()
    bound = active()
    if bound is not None and chosen.path is not None and bound != chosen.path.resolve():
        return f"{bound.name} (MLX does not use {text} from {chosen.source})"
    return f"{text} ({chosen.source})"


def active() -> Path | None:
    """Return the file that MLX's `cblas_sgemm` is bound to, looked up in the loaded MLX library.

    None before `mlx.core` is imported, or where MLX calls no BLAS.
    """
    library = _find_mlx()
    if library is None or "mlx.core" not in sys.modules:
        return None
    bound = elf.find_binding(library, "cblas_sgemm")
    return _shimmed.get(bound, bound) if bound else None


# Shim file to the library behind it.
_shimmed: dict[Path, Path] = {}


def _find_mlx() -> Path | None:
    """Return the MLX library of a Linux installation without importing it."""
    spec = importlib.util.find_spec("mlx") if sys.platform == "linux" else None
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    for pattern in ("lib/libmlx.so", "core*.so"):  # the second holds everything in a static build
        for folder in folders:
            for library in sorted(folder.glob(pattern)):
                return library.resolve()
    return None


def _load_requested(request: str, needed: list[str]) -> Blas:
    if request == "system":
        found = _load_system(needed)
        if found is None:
            raise BlasError(
                f"{_VARIABLE}=system: found no usable OpenBLAS, MKL or BLIS "
                f"(tried {', '.join(_SYSTEM)})"
            )
        return found
    try:
        return _load_scipy(needed) if request == "scipy" else _load_file(Path(request), needed)
    except (BlasError, shim.ShimError) as error:
        raise BlasError(f"{_VARIABLE}={request}: {error}") from error


def _load_file(file: Path, needed: list[str]) -> Blas:
    file = file.expanduser().resolve()
    if not file.is_file():
        raise BlasError(
            "no such file. Give the path of a BLAS library, or one of `system`, `scipy`, `none`"
        )
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise BlasError(f"not a library that loads here: {error}") from error
    prefix = _PREFIX if hasattr(library, _PREFIX + _REQUIRED[0]) else ""
    missing = [name for name in _REQUIRED if not hasattr(library, prefix + name)]
    if missing:
        raise BlasError(f"this library does not define {', '.join(missing)}")
    kind = _identify(library, prefix) or _Kind(file.name, "")
    if kind.problem:
        raise BlasError(" ".join(filter(None, kind)))
    file = _expose(file, library, prefix, kind, needed)
    return Blas(kind.name, kind.version, file, "env")


def _load_system(needed: list[str]) -> Blas | None:
    for name in _SYSTEM:
        for place in (name, str(Path(sys.prefix, "lib", name))):
            library = _open(place)  # local at first: what is refused must not be seen by others
            if library is None or not all(hasattr(library, function) for function in _REQUIRED):
                continue
            kind = _identify(library)
            if kind is not None and not kind.problem:
                file = elf.find_file(_get_address(library, _REQUIRED[0])) or Path(place)
                file = _expose(file, library, "", kind, needed)
                return Blas(kind.name, kind.version, file, "system")
    return None


def _load_scipy(needed: list[str]) -> Blas:
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder, "lib").glob("libscipy_openblas*.so*")):
            found = _load_file(file, needed)
            return Blas(found.name, found.version, found.path, "scipy-openblas32")
    raise BlasError("the package scipy-openblas32 is not installed")


def _expose(file: Path, library: ctypes.CDLL, prefix: str, kind: _Kind, needed: list[str]) -> Path:
    """Put a library that is loaded locally before MLX's own; an OpenBLAS by way of the shim.

    Returns:
        The file that serves `cblas_sgemm` from now on: MKL's is behind the one that was opened.
    """
    if prefix or kind.name == "OpenBLAS":
        names = [name for name in (*needed, *shim.EXTRA) if hasattr(library, prefix + name)]
        try:
            shim_file = shim.load_shim(
                {name: _get_address(library, prefix + name) for name in names}
            )
        except shim.ShimError:
            if prefix:
                raise
        else:
            _shimmed[shim_file.resolve()] = file
            return file
    ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    return elf.find_file(_get_address(ctypes.CDLL(None), _REQUIRED[0])) or file


def _accept_present(request: str) -> Blas:
    """Take what LD_PRELOAD or another package put into the global scope: it will serve MLX."""
    scope = ctypes.CDLL(None)
    file = elf.find_file(_get_address(scope, _REQUIRED[0]))
    if request not in ("", "system") and Path(request).expanduser().resolve() != file:
        raise BlasError(
            f"{_VARIABLE}={request}: this process has already loaded {file}, and the first one "
            f"counts. Unset {_VARIABLE}, or import funcrt before what loads that (see LD_PRELOAD)."
        )
    kind = _identify(scope)
    if kind is None or kind.problem:
        return _warn_reference(f"this process has already loaded {file}, and the first one counts")
    return Blas(kind.name, kind.version, file, "system")


def _report_bound(library: Path) -> Blas:
    """MLX was imported first: say what it got, and warn if that is not a fast one."""
    file = elf.find_binding(library, _REQUIRED[0])
    bound = _open(str(file)) if file else None
    kind = _identify(bound) if bound else None
    if kind is None:
        return _warn_reference("mlx was imported before funcrt: import funcrt first")
    return Blas(kind.name, kind.version, file, "builtin")


def _warn_reference(reason: str) -> Blas:
    warnings.warn(
        f"MLX computes with the reference BLAS, many times slower than a fast one: {reason}.",
        RuntimeWarning,
        stacklevel=4,
    )
    return Blas("reference BLAS", "", None, "builtin")


def _identify(library: ctypes.CDLL, prefix: str = "") -> _Kind | None:
    """Tell a fast BLAS by functions that only it has. None for the reference BLAS and strangers."""
    if hasattr(library, f"{prefix}openblas_get_config"):
        get_config = library[f"{prefix}openblas_get_config"]
        get_config.restype = ctypes.c_char_p
        words = get_config().decode().split()  # "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH ..."
        return _Kind("OpenBLAS", words[1], _WIDE if "USE64BITINT" in words else "")
    if hasattr(library, "mkl_get_version_string"):
        problem = _find_mkl_problem(library)
        if problem:
            return _Kind("MKL", "", problem)
        text = ctypes.create_string_buffer(200)
        library.mkl_get_version_string(text, len(text))
        words = text.value.decode().split()  # "... Library Version 2026.2-Product Build ..."
        version = next((word for word in words if word[0].isdigit()), "").partition("-")[0]
        return _Kind("MKL", version)
    if hasattr(library, "bli_info_get_version_str"):
        library.bli_info_get_version_str.restype = ctypes.c_char_p
        library.bli_info_get_blas_int_type_size.restype = ctypes.c_int64
        version = library.bli_info_get_version_str().decode()
        wide = library.bli_info_get_blas_int_type_size() != 32
        return _Kind("BLIS", version, _WIDE if wide else "")
    return None


def _find_mkl_problem(mkl: ctypes.CDLL) -> str:
    """Look before MKL's first call, which ends the process or puts its layers before all else."""
    if "ILP64" in os.environ.get("MKL_INTERFACE_LAYER", "").upper():
        return _WIDE
    file = elf.find_file(_get_address(mkl, "mkl_get_version_string"))
    places = ["libiomp5.so", *([str(file.with_name("libiomp5.so"))] if file else [])]
    if "MKL_THREADING_LAYER" in os.environ or any(map(_open, places)):
        return ""
    return "finds no libiomp5.so, its thread library (package intel-openmp)"


def _open(place: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(place)
    except OSError:
        return None


def _get_address(library: ctypes.CDLL, function: str) -> int:
    return ctypes.cast(library[function], ctypes.c_void_p).value or 0
