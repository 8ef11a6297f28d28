#include "blas.hpp"

#include <dlfcn.h>
#include <glob.h>
#include <unistd.h>

#include <array>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <optional>

#include "blas_build.h"
#include "error.hpp"

namespace funcrt {
namespace {

constexpr std::array kRequired = {FUNCRT_REQUIRED_NAMES};
constexpr std::array kSystem = {FUNCRT_SYSTEM_LIBRARIES};
constexpr const char* kPrefix = "scipy_";
constexpr const char* kWide = "is built for 64-bit integers; MLX needs 32-bit ones";
constexpr const char* kAdvice =
    "Install one: `pip install scipy-openblas32` or `apt-get install libopenblas0-pthread`";
#if FUNCRT_HAS_SHIM
constexpr std::array kShimNames = {FUNCRT_SHIM_NAMES};
#endif

struct Kind {
  std::string name, version, problem;  // problem: why MLX cannot use it
};

void* find(void* library, const std::string& name) { return dlsym(library, name.c_str()); }

template <typename Function>
Function* find_function(void* library, const std::string& name) {
  return reinterpret_cast<Function*>(find(library, name));
}

void* open_locally(const std::string& place) {
  return dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
}

std::string resolve(const std::string& path) {
  char buffer[PATH_MAX];
  return realpath(path.c_str(), buffer) == nullptr ? path : buffer;
}

/// The file that an address was loaded from.
std::string find_file(void* address) {
  Dl_info info{};
  return address != nullptr && dladdr(address, &info) != 0 ? resolve(info.dli_fname) : "";
}

std::string first_version(const std::string& words) {
  std::istringstream items(words);
  for (std::string word; items >> word;) {
    if (word[0] >= '0' && word[0] <= '9') {
      return word.substr(0, word.find('-'));
    }
  }
  return "";
}

/// Look before MKL's first call, which ends the process or puts its layers before all else.
std::string find_mkl_problem(void* mkl) {
  const char* layer = std::getenv("MKL_INTERFACE_LAYER");
  if (layer != nullptr && strcasestr(layer, "ILP64") != nullptr) {
    return kWide;
  }
  const std::string file = find_file(find(mkl, "mkl_get_version_string"));
  const std::string beside = file.substr(0, file.rfind('/') + 1) + "libiomp5.so";
  if (std::getenv("MKL_THREADING_LAYER") != nullptr || open_locally("libiomp5.so") != nullptr ||
      open_locally(beside) != nullptr) {
    return "";
  }
  return "finds no libiomp5.so, its thread library (package intel-openmp)";
}

/// Tell a fast BLAS by functions that only it has. None for the reference BLAS and strangers.
std::optional<Kind> identify(void* library, const std::string& prefix = "") {
  if (const auto config = find_function<char*()>(library, prefix + "openblas_get_config")) {
    const std::string words = config();  // "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH ..."
    std::istringstream items(words);
    std::string name, version;
    items >> name >> version;
    const bool wide = words.find("USE64BITINT") != std::string::npos;
    return Kind{"OpenBLAS", version, wide ? kWide : ""};
  }
  if (const auto describe = find_function<void(char*, int)>(library, "mkl_get_version_string")) {
    if (const std::string problem = find_mkl_problem(library); !problem.empty()) {
      return Kind{"MKL", "", problem};
    }
    char words[200] = {};
    describe(words, sizeof words - 1);
    return Kind{"MKL", first_version(words), ""};
  }
  if (const auto version = find_function<const char*()>(library, "bli_info_get_version_str")) {
    const auto bits = find_function<int64_t()>(library, "bli_info_get_blas_int_type_size");
    return Kind{"BLIS", version(), bits != nullptr && bits() == 32 ? "" : kWide};
  }
  return std::nullopt;
}

}  // namespace

Blas::Blas() {
  if (!FUNCRT_NEEDS_BLAS) {
    description_ = FUNCRT_OWN_BLAS " (not needed)";
    return;
  }
  const char* variable = std::getenv("FUNCRT_BLAS");
  const std::string request = variable == nullptr ? "" : variable;
  std::string problem;
  if (request == "none") {
    warn_reference("FUNCRT_BLAS=none asks for it");
  } else if (!use_present(request) && !use_request(request) && !use_system() &&
             !use_scipy(problem)) {
    warn_reference(text("no OpenBLAS, MKL or BLIS found, and ", problem, ". ", kAdvice));
  }
}

/// Take what LD_PRELOAD put into the global scope: it will serve MLX.
bool Blas::use_present(const std::string& request) {
  void* address = find(RTLD_DEFAULT, kRequired[0]);
  if (address == nullptr) {
    return false;
  }
  const std::string file = find_file(address);
  if (request != "" && request != "system" && resolve(request) != file) {
    throw Error(text("FUNCRT_BLAS=", request, ": this process has already loaded ", file,
                     ", and the first one counts. Unset FUNCRT_BLAS (see LD_PRELOAD)"));
  }
  const auto kind = identify(RTLD_DEFAULT);
  if (!kind || !kind->problem.empty()) {
    warn_reference(text("this process has already loaded ", file, ", and the first one counts"));
  } else {
    describe(kind->name, kind->version, "system");
  }
  return true;
}

bool Blas::use_request(const std::string& request) {
  if (request.empty()) {
    return false;
  }
  std::string problem;
  if (request == "system") {
    if (!use_system()) {
      throw Error(text("FUNCRT_BLAS=system: found no usable OpenBLAS, MKL or BLIS (tried ",
                       join(kSystem), ")"));
    }
  } else if (request == "scipy") {
    if (!use_scipy(problem)) {
      throw Error(text("FUNCRT_BLAS=scipy: ", problem));
    }
  } else {
    try {
      use_file(request, "env");
    } catch (const Error& error) {
      throw Error(text("FUNCRT_BLAS=", request, ": ", error.what()));
    }
  }
  return true;
}

bool Blas::use_system() {
  for (const std::string name : kSystem) {
    for (const std::string& place : {name, text(FUNCRT_PREFIX, "/lib/", name)}) {
      void* library = open_locally(place);  // what is refused must not be seen by others
      bool complete = library != nullptr;
      for (const char* function : kRequired) {
        complete = complete && find(library, function) != nullptr;
      }
      const auto kind = complete ? identify(library) : std::nullopt;
      if (kind && kind->problem.empty()) {
        const std::string file = find_file(find(library, kRequired[0]));
        expose(library, file.empty() ? place : file, "", kind->name == "OpenBLAS");
        describe(kind->name, kind->version, "system");
        return true;
      }
    }
  }
  return false;
}

/// The package scipy-openblas32 of the Python whose MLX this is linked to.
bool Blas::use_scipy(std::string& problem) {
  problem = "the package scipy-openblas32 is not installed beside MLX";
  glob_t found{};
  const std::string pattern = FUNCRT_PACKAGES "/scipy_openblas32/lib/libscipy_openblas*.so*";
  const bool any = glob(pattern.c_str(), 0, nullptr, &found) == 0 && found.gl_pathc > 0;
  const std::string file = any ? found.gl_pathv[0] : "";
  globfree(&found);
  if (!any) {
    return false;
  }
  try {
    use_file(file, "scipy-openblas32");
  } catch (const Error& error) {
    problem = error.what();
    return false;
  }
  return true;
}

void Blas::use_file(const std::string& name, const std::string& source) {
  const std::string file = resolve(name);
  if (access(file.c_str(), R_OK) != 0) {
    throw Error(
        "no such file. Give the path of a BLAS library, or one of `system`, `scipy`, `none`");
  }
  void* library = open_locally(file);
  if (library == nullptr) {
    throw Error(text("not a library that loads here: ", dlerror()));
  }
  const std::string prefix = find(library, text(kPrefix, kRequired[0])) != nullptr ? kPrefix : "";
  for (const char* function : kRequired) {
    if (find(library, prefix + function) == nullptr) {
      throw Error(text("this library does not define ", function));
    }
  }
  const Kind kind = identify(library, prefix).value_or(Kind{file.substr(file.rfind('/') + 1), "", ""});
  if (!kind.problem.empty()) {
    throw Error(text(kind.name, " ", kind.version, kind.version.empty() ? "" : " ", kind.problem));
  }
  expose(library, file, prefix, kind.name == "OpenBLAS");
  describe(kind.name, kind.version, source);
}

/// Put a library that is loaded locally before MLX's own; an OpenBLAS by way of the shim.
void Blas::expose(void* library, const std::string& file, const std::string& prefix,
                  bool is_openblas) {
  if (prefix.empty() && !(is_openblas && FUNCRT_HAS_SHIM)) {
    dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
    return;
  }
#if FUNCRT_HAS_SHIM
  void* shim = open_locally(FUNCRT_SHIM_LIBRARY);
  table_ = shim == nullptr ? nullptr : static_cast<void**>(find(shim, FUNCRT_SHIM_TABLE));
  if (table_ == nullptr) {
    throw Error(text("cannot load ", FUNCRT_SHIM_LIBRARY, ": build funcrt_run again"));
  }
  for (size_t i = 0; i < kShimNames.size(); i++) {
    table_[i] = find(library, prefix + kShimNames[i]);
  }
  dlopen(FUNCRT_SHIM_LIBRARY, RTLD_NOW | RTLD_GLOBAL);  // seen by others only now
#else
  throw Error("there is no shim for its names on this machine");
#endif
}

void Blas::complete([[maybe_unused]] void* mlx) {
#if FUNCRT_HAS_SHIM
  for (size_t i = 0; table_ != nullptr && i < kShimNames.size(); i++) {
    if (table_[i] == nullptr) {
      table_[i] = find(mlx, kShimNames[i]);
    }
  }
#endif
}

void Blas::describe(const std::string& name, const std::string& version,
                    const std::string& source) {
  description_ = text(name, version.empty() ? "" : " ", version, " (", source, ")");
}

void Blas::warn_reference(const std::string& reason) {
  std::cerr << "warning: MLX computes with the reference BLAS, many times slower than a fast one: "
            << reason << "." << std::endl;
  describe("reference BLAS", "", "builtin");
}

}  // namespace funcrt
