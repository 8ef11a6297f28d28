#pragma once

#include <vector>

#include "mlx/array.h"
#include "mlx/ops.h"

namespace funcrt {

/// An array of the given values.
template <typename T>
mlx::core::array make_array(const std::vector<T>& values, mlx::core::Shape shape,
                            mlx::core::Dtype dtype) {
  return mlx::core::array(values.begin(), std::move(shape), dtype);
}

/// The values of an array, row after row, computed if need be. Its dtype has to be T's.
template <typename T>
std::vector<T> read_array(const mlx::core::array& array) {
  mlx::core::array flat = mlx::core::contiguous(array);
  flat.eval();
  const T* first = flat.data<T>();
  return std::vector<T>(first, first + flat.size());
}

/// The same of bools, as 0 and 1.
inline std::vector<char> read_bools(const mlx::core::array& array) {
  const std::vector<bool> values = read_array<bool>(array);
  return {values.begin(), values.end()};
}

}  // namespace funcrt
