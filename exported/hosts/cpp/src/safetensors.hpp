#pragma once

#include <string>
#include <unordered_map>

#include "mlx/array.h"

namespace funcrt {

using NamedArrays = std::unordered_map<std::string, mlx::core::array>;

/// The arrays of a safetensors file, read when they are used.
///
/// Raises Error unless its header is sound and, where `header` is not empty, has that sha256: MLX
/// does not check what it reads.
NamedArrays load_safetensors(const std::string& path, const std::string& header = "");

}  // namespace funcrt
