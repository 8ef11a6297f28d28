#pragma once

#include <string>
#include <vector>

namespace funcrt {

/// The library that serves MLX's matrix products on a Linux CPU, chosen as by funcrt/blas.py.
///
/// Create it before MLX is loaded. Raises Error where FUNCRT_BLAS names what cannot be used.
class Blas {
 public:
  Blas();

  /// Fill what the library lacks with MLX's own; `mlx` is a handle through which MLX is seen.
  void complete(void* mlx);

  /// Which one, e.g. "OpenBLAS 0.3.30 (scipy-openblas32)".
  const std::string& description() const { return description_; }

 private:
  bool use_request(const std::string& request);  // these say whether they found one
  bool use_present(const std::string& request);
  bool use_system();
  bool use_scipy(std::string& problem);
  void use_file(const std::string& file, const std::string& source);
  void expose(void* library, const std::string& file, const std::string& prefix, bool is_openblas);
  void describe(const std::string& name, const std::string& version, const std::string& source);
  void warn_reference(const std::string& reason);

  std::string description_;
  void** table_ = nullptr;  // of the shim; null without one
};

}  // namespace funcrt
