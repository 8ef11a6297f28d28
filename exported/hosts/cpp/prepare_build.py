"""Writes what funcrt_run shares with the Python package: the BLAS shim, and where MLX lies.

CMake runs it when it configures, with the Python whose MLX the program is built against. Nothing of
Python is needed afterwards.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from funcrt import blas, elf, shim

import mlx.core as mx


def main(folder: Path) -> None:
    """Write `blas_build.h`, `shim.c` (empty without one) and `mlx.cmake` into `folder`."""
    package = Path(mx.__file__).parent
    library = blas._find_mlx()
    needed, cuda = elf.read_needs(library) if library else ([], False)
    needs_blas = "cblas_sgemm" in needed and not cuda
    names = [*needed, *shim.EXTRA] if needs_blas else []
    try:
        source = shim.make_source(names) if needs_blas else ""
    except shim.ShimError:
        source = ""
    own = "Accelerate" if sys.platform == "darwin" else "CUDA" if cuda else "none"
    defines = {
        "FUNCRT_NEEDS_BLAS": str(int(needs_blas)),
        "FUNCRT_OWN_BLAS": _quote(own),
        "FUNCRT_HAS_SHIM": str(int(bool(source))),
        "FUNCRT_SHIM_NAMES": _quote(*names),
        "FUNCRT_SHIM_TABLE": _quote(shim._TABLE),
        "FUNCRT_REQUIRED_NAMES": _quote(*blas._REQUIRED),
        "FUNCRT_SYSTEM_LIBRARIES": _quote(*blas._SYSTEM),
        "FUNCRT_PACKAGES": _quote(str(package.parent)),
        "FUNCRT_PREFIX": _quote(sys.prefix),
    }
    folder.mkdir(parents=True, exist_ok=True)
    header = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    _write(folder / "blas_build.h", f"#pragma once\n\n{header}")
    _write(folder / "shim.c", source)
    sources = (library or package / "__init__.py", shim.__file__, shim.CODE, blas.__file__)
    watched = [str(source) for source in (*sources, elf.__file__)]
    cmake = {
        "MLX_ROOT": json.dumps(str(package)),
        "FUNCRT_HAS_SHIM": str(int(bool(source))),
        "FUNCRT_WATCHED": json.dumps(";".join(watched)),
    }
    _write(folder / "mlx.cmake", "".join(f"set({name} {value})\n" for name, value in cmake.items()))


def _quote(*texts: str) -> str:
    return ", ".join(json.dumps(text) for text in texts)


def _write(path: Path, text: str) -> None:
    """Leave the file alone if nothing changes, so that nothing is built again."""
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
