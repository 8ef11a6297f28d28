#pragma once

#include <vector>

#include "mlx/array.h"
#include "safetensors.hpp"

namespace funcrt {

/// A table of small integers or flags, row after row.
struct Table {
  std::vector<int> values;
  int width;

  int at(int row, int column) const { return values[static_cast<size_t>(row) * width + column]; }
};

Table read_table(const mlx::core::array& array);

// What golden calls record in a shorter form, as exported/README.md says. All raise
// std::out_of_range where something is missing.

/// Causal over the real tokens, but for one cached slot per row that nobody sees: [B,1,T,S].
mlx::core::array make_mask(const Table& valid, const std::vector<int>& hidden,
                           const std::vector<int>& lengths, int capacity);

/// Real tokens see the real ones up to themselves: [B,T,T].
mlx::core::array make_block(const Table& valid, int batch);

/// `bias` [B,V] from a value per row and others at some places.
mlx::core::array spread_bias(const NamedArrays& inputs, int vocab);

/// `history` [B,V], which is 0 but at some places.
mlx::core::array spread_history(const NamedArrays& inputs, int batch, int vocab);

}  // namespace funcrt
