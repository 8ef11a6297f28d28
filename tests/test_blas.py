"""The choice of the host BLAS. It acts once per process, so most of this runs in new processes."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from funcrt import blas, elf, shim
from funcrt.errors import FuncrtError

import pytest

ROOT = Path(__file__).parent.parent
MLX = blas._find_mlx()

pytestmark = pytest.mark.skipif(
    MLX is None or blas.load().source == "not needed", reason="MLX computes with no BLAS here"
)
CPU = Path("/proc/cpuinfo")
needs_avx2 = pytest.mark.skipif(
    platform.machine() != "x86_64" or " avx2 " not in CPU.read_text(), reason="needs AVX2"
)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

PRODUCTS = """
from funcrt import blas
import mlx.core as mx
import numpy as np
mx.set_default_device(mx.cpu)
rng = np.random.default_rng(0)
def check(got, want):
    want = np.asarray(want)
    np.testing.assert_allclose(np.array(got), want, rtol=0, atol=2e-5 * np.abs(want).max())
for rows in (1, 2, 33):
    a, b = rng.standard_normal((rows, 65)), rng.standard_normal((65, 40))
    x, w = mx.array(a, mx.float32), mx.array(b, mx.float32)
    check(x @ w, a @ b)
    check(x @ mx.contiguous(w.T).T, a @ b)
    check((mx.contiguous(x.T).T @ w)[:, :7], (a @ b)[:, :7])
    check(x @ w[:, :1], a @ b[:, :1])
a = rng.standard_normal((20, 20)) + 20 * np.eye(20)
x = mx.array(a, mx.float32)
check(mx.linalg.inv(x) @ x, np.eye(20))
q, r = mx.linalg.qr(x)
check(q @ r, a)
check(mx.linalg.svd(x)[1], np.linalg.svd(a)[1])
print(blas.active())
print(blas.describe())
"""

GEMM = """
import ctypes, itertools
import numpy as np
from funcrt import blas
blas.load()
gemm = ctypes.CDLL(None).cblas_sgemm
real = [ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
gemm.argtypes = [ctypes.c_int] * 6 + real + real[:3]
rng = np.random.default_rng(0)
def stored(array, trans, spare):  # as BLAS wants it, rows longer than needed
    array = array.T if trans == 112 else array
    wide = np.full((array.shape[0], array.shape[1] + spare), np.nan, np.float32)
    wide[:, : array.shape[1]] = array
    return wide
def multiply(x, w, spare=0, trans=112, to=None):  # x [m,k] by w [n,k], or [k,n] if trans is 111
    n = w.shape[0 if trans == 112 else 1]  # all with rows longer than needed
    X, W = stored(x, 111, spare), stored(w, 111, spare)
    y = np.full((len(x), n + spare), np.nan, np.float32)
    if to is not None:
        y[:, :n] = to
    gemm(101, 111, trans, len(x), n, x.shape[1], 1.0, X.ctypes.data, X.shape[1],
         W.ctypes.data, W.shape[1], float(to is not None), y.ctypes.data, y.shape[1])
    assert np.isnan(y[:, n:]).all()
    return y[:, :n]
def draw(*shape):
    return rng.standard_normal(shape).astype(np.float32)
"""

EVERY_FORM = """
for m, n, k, ta, tb, beta, spare in itertools.product(
    (1, 3), (1, 70), (1, 50), (111, 112), (111, 112), (0.0, 0.5), (0, 5)
):
    a = rng.standard_normal((m, k)).astype(np.float32)
    b = rng.standard_normal((k, n)).astype(np.float32)
    c = np.full((m, n + spare), np.nan, np.float32)
    if beta:
        c[:, :n] = rng.standard_normal((m, n))
    want = 2 * a.astype(float) @ b + (beta * c[:, :n] if beta else 0)
    A, B = stored(a, ta, spare), stored(b, tb, spare)
    gemm(101, ta, tb, m, n, k, 2.0, A.ctypes.data, A.shape[1], B.ctypes.data, B.shape[1], beta,
         c.ctypes.data, c.shape[1])
    np.testing.assert_allclose(c[:, :n], want, rtol=1e-5, atol=1e-4)
    assert np.isnan(c[:, n:]).all()
"""

FEW_ROWS = """
import os, threading
# n and k for which rows are multiplied as they are, and some that go to the library; 128 rows are
# the most; 1028 times 576 weights are shared with helpers.
for m, n, k in itertools.product((1, 2, 4, 7, 12, 40, 128, 129), (4, 6, 1028), (16, 24, 576)):
    x, w = draw(m, k), draw(n, k)
    y = multiply(x, w, spare=4)
    want = x.astype(float) @ w.T.astype(float)
    np.testing.assert_allclose(y, want, rtol=0, atol=2e-6 * np.sqrt(k) * np.abs(want).max())
x, w = draw(128, 576), draw(1028, 576)
y = multiply(x, w)
print(all((multiply(x[:m], w) == y[:m]).all() for m in (1, 2, 3, 5, 11, 12, 39, 127)))
def repeat():
    results.append(all((multiply(x[:m], w) == y[:m]).all() for m in (1, 4, 40) for _ in range(20)))
results = []
threads = [threading.Thread(target=repeat) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(results)
child = os.fork()
if child == 0:
    os._exit(not (multiply(x, w) == y).all())
print(os.waitpid(child, 0)[1])
"""

# Values of heads: those that the shim multiplies, and some that go to the library. 600 slots are
# summed in three pieces; 256 times 600 are shared with helpers.
HEADS = """
for m, n, k in itertools.product((1, 2, 3, 5, 7, 8, 9), (32, 64, 80, 256, 288), (1, 5, 256, 600)):
    x, w = draw(m, k), draw(k, n)
    want = x.astype(float) @ w.astype(float)
    y = multiply(x, w, spare=4, trans=111)
    np.testing.assert_allclose(y, want, rtol=0, atol=2e-6 * np.sqrt(k) * np.abs(want).max())
for k in (64, 600):
    x, w = draw(8, k), draw(k, 256)
    y = multiply(x, w, trans=111)
    rows = all((multiply(x[i:i + m], w, trans=111) == y[i:i + m]).all()
               for m in range(2, 9) for i in range(9 - m))
    columns = (multiply(x, np.ascontiguousarray(w[:, 64:96]), trans=111) == y[:, 64:96]).all()
    print(rows, columns)
"""

# A product that is added to something is that product, added.
ADDED = """
for m in (1, 2, 4, 12, 40):
    for trans, w in ((112, draw(1028, 576)), (112, draw(64, 64)), (111, draw(600, 64))):
        x = draw(m, w.shape[1 if trans == 112 else 0])
        to = draw(m, w.shape[0 if trans == 112 else 1])
        product, found = multiply(x, w, 4, trans), multiply(x, w, 4, trans, to)
        np.testing.assert_allclose(found, to + product, rtol=0, atol=1e-5 * np.abs(found).max())
        if trans == 112:
            assert (found == to + product).all(), (m, trans)
"""

# Sums of ones; rows that lie on one another make 2**31 values of x out of 2**24.
LONG_ROWS = """
multiply(draw(12, 1024), draw(128, 1024))
k = 1 << 24
x, y = np.ones(k, np.float32), np.zeros((128, 4), np.float32)
gemm(101, 111, 112, 128, 4, k, 1.0, x.ctypes.data, 0, x.ctypes.data, 0, 0.0, y.ctypes.data, 4)
print((y == k).all())
"""

FAST = 'const char *bli_info_get_version_str(void) { return "9.9"; }\n'
FAST += "long bli_info_get_blas_int_type_size(void) { return 32; }\n"
WIDE = 'const char *openblas_get_config(void) { return "OpenBLAS 0.3.0 USE64BITINT"; }\n'


def run(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("FUNCRT_BLAS", "LD_PRELOAD")}
    env = {**inherited, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "always", **settings}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def run_ok(code: str, **settings: str) -> str:
    done = run(code, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_library(file: Path, code: str, functions: tuple[str, ...] = blas._REQUIRED) -> Path:
    """Compile a library that has the given functions, none of which computes anything."""
    stubs = "".join(f"void {name}(void) {{}}\n" for name in functions)
    source = file.with_suffix(".c")
    source.write_text(code + stubs)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(file), str(source)], check=True, timeout=60)
    return file


def at(folder: Path) -> dict[str, str]:
    return {"FUNCRT_BLAS": "system", "LD_LIBRARY_PATH": str(folder)}


@needs_compiler
def test_scipy_openblas_serves_mlx_and_is_right() -> None:
    found, line = run_ok(PRODUCTS, FUNCRT_BLAS="scipy").splitlines()
    assert Path(found).name.startswith("libscipy_openblas")
    assert line.startswith("OpenBLAS 0.3.")
    assert line.endswith("(scipy-openblas32)")


@needs_compiler
def test_one_row_products_follow_every_form_of_sgemm() -> None:
    run_ok(GEMM + EVERY_FORM, FUNCRT_BLAS="scipy")


@needs_compiler
@needs_avx2
@pytest.mark.parametrize("threads", ["1", "3"])
def test_few_rows_are_what_each_is_alone_whoever_calls(threads: str) -> None:
    found = run_ok(GEMM + FEW_ROWS, FUNCRT_BLAS="scipy", OPENBLAS_NUM_THREADS=threads)
    assert found.splitlines() == ["True", "[True, True, True]", "0"]


@needs_compiler
@needs_avx2
@pytest.mark.parametrize("threads", ["1", "3"])
def test_values_of_heads_are_summed_alike_for_all_rows(threads: str) -> None:
    found = run_ok(GEMM + HEADS, FUNCRT_BLAS="scipy", OPENBLAS_NUM_THREADS=threads)
    assert found.splitlines() == ["True True"] * 2


@needs_compiler
@needs_avx2
def test_products_are_added_last() -> None:
    run_ok(GEMM + ADDED, FUNCRT_BLAS="scipy")


@needs_compiler
@needs_avx2
def test_rows_may_be_longer_than_any_copy() -> None:
    assert run_ok(GEMM + LONG_ROWS, FUNCRT_BLAS="scipy") == "True\n"


def test_none_warns_once_and_leaves_mlx_its_own() -> None:
    done = run("from funcrt import blas; blas.load(); blas.load()\n" + PRODUCTS, FUNCRT_BLAS="none")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert "FUNCRT_BLAS=none" in done.stderr
    found, line = done.stdout.splitlines()
    assert "scipy_openblas" not in found
    assert line == "reference BLAS (builtin)"


def test_mlx_imported_first_warns_once() -> None:
    code = "import mlx.core\nfrom funcrt import blas\nprint(blas.load() is blas.load())\n"
    done = run(code + "print(blas.describe())")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "reference BLAS (builtin)"]
    assert done.stderr.count("RuntimeWarning") == 1
    assert "import funcrt first" in done.stderr


# The package without what its __init__ does after the choice: it reserves streams, with mlx.
ALONE = f"""
import sys, types
package = sys.modules["funcrt"] = types.ModuleType("funcrt")
package.__path__ = [{str(Path(blas.__file__).parent)!r}]
from funcrt import blas
blas.load()
"""


def test_before_mlx_nothing_is_bound() -> None:
    assert run_ok(f"{ALONE}print(blas.active())") == "None\n"


def test_choosing_does_not_import_mlx() -> None:
    code = f"{ALONE}print([m for m in sys.modules if m.partition('.')[0] == 'mlx'])"
    assert run_ok(code) == "[]\n"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("/no/such/lib.so", "no such file. Give the path of a BLAS library, or one of"),
        (__file__, "not a library that loads here"),
    ],
)
def test_a_path_that_cannot_serve_is_an_error(value: str, message: str) -> None:
    done = run("import funcrt", FUNCRT_BLAS=value)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"BlasError: FUNCRT_BLAS={value}: " in last
    assert message in last
    assert issubclass(blas.BlasError, FuncrtError)


@needs_compiler
def test_a_library_that_is_no_blas_is_an_error(tmp_path: Path) -> None:
    file = make_library(tmp_path / "libother.so", "", ("cblas_dgemm",))
    last = run("import funcrt", FUNCRT_BLAS=str(file)).stderr.splitlines()[-1]
    assert "does not define cblas_sgemm, cblas_sgemv, cblas_cgemm" in last


@needs_compiler
def test_64_bit_integers_are_refused(tmp_path: Path) -> None:
    file = make_library(tmp_path / "libopenblas.so.0", WIDE)
    done = run("import funcrt", FUNCRT_BLAS=str(file))
    assert "OpenBLAS 0.3.0 is built for 64-bit integers" in done.stderr.splitlines()[-1]
    assert "no usable OpenBLAS" in run("import funcrt", **at(tmp_path)).stderr


@needs_compiler
def test_a_reference_blas_under_a_fast_name_is_refused(tmp_path: Path) -> None:
    make_library(tmp_path / "libopenblas.so.0", "")
    assert "no usable OpenBLAS" in run("import funcrt", **at(tmp_path)).stderr


@needs_compiler
def test_a_system_library_serves_mlx(tmp_path: Path) -> None:
    make_library(tmp_path / "libopenblas.so.0", WIDE)  # refused, and must not be in the way
    file = make_library(tmp_path / "libblis.so.4", FAST)
    code = "from funcrt import blas\nimport mlx.core\nprint(blas.active(), blas.describe())"
    assert run_ok(code, **at(tmp_path)) == f"{file} BLIS 9.9 (system)\n"
    # What is found there comes before the package.
    settings = {**at(tmp_path), "FUNCRT_BLAS": ""}
    assert run_ok(code, **settings) == f"{file} BLIS 9.9 (system)\n"


@needs_compiler
def test_what_is_preloaded_counts(tmp_path: Path) -> None:
    file = make_library(tmp_path / "libmine.so", FAST)
    code = "from funcrt import blas\nimport mlx.core\nprint(blas.active(), blas.describe())"
    assert run_ok(code, LD_PRELOAD=str(file)) == f"{file} BLIS 9.9 (system)\n"
    done = run("import funcrt", LD_PRELOAD=str(file), FUNCRT_BLAS="scipy")
    assert f"already loaded {file}" in done.stderr.splitlines()[-1]


@needs_compiler
def test_a_library_without_lapack_is_enough(tmp_path: Path) -> None:
    file = make_library(tmp_path / "libany.so", "")
    code = "from funcrt import blas\nimport mlx.core\nprint(blas.active(), blas.load().source)"
    assert run_ok(code, FUNCRT_BLAS=str(file)) == f"{file} env\n"


@needs_compiler
def test_the_shim_is_made_once_and_privately(tmp_path: Path) -> None:
    code = "import funcrt"
    settings = {"FUNCRT_BLAS": "scipy", "XDG_CACHE_HOME": str(tmp_path)}
    env = {**os.environ, "PYTHONPATH": str(ROOT), **settings}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    folder = tmp_path / "funcrt" / "blas"
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    before = file.stat()
    run_ok(code, **settings, PATH="")
    assert file.stat().st_mtime_ns == before.st_mtime_ns

    file.write_bytes(b"damaged")
    run_ok(code, **settings)
    assert file.stat().st_size == before.st_size

    file.unlink()
    folder.chmod(0o777)
    run_ok(PRODUCTS, **settings)
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_cpp_compiler_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim, "_find_compilers", lambda: iter([["c++"]]))
    file = tmp_path / "shim.so"
    shim._compile(shim.make_source(["cblas_sgemm", *shim.EXTRA]), file)
    assert hasattr(ctypes.CDLL(str(file)), "cblas_sgemm")


def test_no_compiler_is_said(tmp_path: Path) -> None:
    settings = {"PATH": "", "CC": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = run("import funcrt", FUNCRT_BLAS="scipy", **settings)
    assert "FUNCRT_BLAS=scipy: no C compiler found" in done.stderr.splitlines()[-1]
    if blas.load().source != "system":
        done = run("import funcrt", **settings)
        assert done.returncode == 0
        assert done.stderr.count("RuntimeWarning") == 1
        assert "pip install scipy-openblas32" in done.stderr


def test_an_unknown_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim, "_machine", lambda: "riscv64")
    with pytest.raises(shim.ShimError, match="no BLAS shim for machine 'riscv64'"):
        shim.make_source(["cblas_sgemm", *shim.EXTRA])


def test_macos_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.load.__wrapped__() == blas.Blas("Accelerate", "", None, "not needed")


@needs_compiler
def test_cuda_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_library(tmp_path / "libcuda.so.1", "", ("cuInit",))
    file = tmp_path / "libmlx.so"
    (tmp_path / "mlx.c").write_text("void cblas_sgemm(void); void f(void) { cblas_sgemm(); }")
    command = ["cc", "-shared", "-fPIC", "-o", str(file), str(tmp_path / "mlx.c")]
    subprocess.run([*command, "-Wl,--no-as-needed", str(driver)], check=True, timeout=60)
    assert elf.read_needs(file) == (["cblas_sgemm"], False)
    subprocess.run(
        [*command, "-Wl,--no-as-needed", f"-L{tmp_path}", "-l:libcuda.so.1"], check=True, timeout=60
    )
    assert elf.read_needs(file) == (["cblas_sgemm"], True)
    monkeypatch.setattr(blas, "_find_mlx", lambda: file)
    assert blas.load.__wrapped__() == blas.Blas("CUDA", "", None, "not needed")


def test_what_mlx_needs_is_read_from_its_file() -> None:
    assert MLX is not None
    names, cuda = elf.read_needs(MLX)
    assert {"cblas_sgemm", "cblas_dgemm", "cblas_cgemm", "sgetrf_", "sgeqrf_"} <= set(names)
    assert not cuda


def test_other_files_are_not_taken_for_libraries(tmp_path: Path) -> None:
    assert MLX is not None
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF"):
        elf.read_needs(Path(__file__))
    cut = tmp_path / "cut.so"
    cut.write_bytes(MLX.read_bytes()[:200])
    with pytest.raises(ValueError, match="is not a shared library"):
        elf.read_needs(cut)


@needs_compiler
def test_a_binding_is_found_only_in_loaded_libraries(tmp_path: Path) -> None:
    assert elf.find_binding(make_library(tmp_path / "libidle.so", ""), "cblas_sgemm") is None


def test_a_bare_mlx_names_the_missing_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = tmp_path / "core.cpython-311-x86_64-linux-gnu.so"
    core.write_bytes(b"\x7fELF needs libmlx.so\0")
    monkeypatch.setattr(blas, "_find_mlx", lambda: core)
    with pytest.raises(ImportError, match=r"pip install 'funcrt\[cpu\]'"):
        blas.check_backend()
    core.write_bytes(b"\x7fELF a static build")
    blas.check_backend()
