#include "recorded.hpp"

#include "arrays.hpp"

namespace mx = mlx::core;

namespace funcrt {

Table read_table(const mx::array& array) {
  return {read_array<int>(mx::astype(array, mx::int32)), array.shape(-1)};
}

mx::array make_mask(const Table& valid, const std::vector<int>& hidden,
                    const std::vector<int>& lengths, int capacity) {
  const int batch = static_cast<int>(lengths.size());
  std::vector<char> mask(valid.values.size() * static_cast<size_t>(capacity));
  for (int b = 0; b < batch; b++) {
    int slot = lengths[b];  // that the next real token takes
    for (int t = 0; t < valid.width; t++) {
      char* row = &mask[(static_cast<size_t>(b) * valid.width + t) * capacity];
      for (int s = 0; valid.at(b, t) && s <= slot && s < capacity; s++) {
        row[s] = s != hidden[b];
      }
      slot += valid.at(b, t);
    }
  }
  return make_array(mask, {batch, 1, valid.width, capacity}, mx::bool_);
}

mx::array make_block(const Table& valid, int batch) {
  const int width = valid.width;
  std::vector<char> block(valid.values.size() * static_cast<size_t>(width));
  for (int b = 0; b < batch; b++) {
    for (int i = 0; i < width; i++) {
      for (int j = 0; j <= i; j++) {
        block[(static_cast<size_t>(b) * width + i) * width + j] = valid.at(b, i) && valid.at(b, j);
      }
    }
  }
  return make_array(block, {batch, width, width}, mx::bool_);
}

/// A [B,V] array from a value per row and others at some places.
template <typename T>
static mx::array spread(const std::vector<T>& fill, const NamedArrays& inputs, const std::string& name,
                 int vocab, mx::Dtype dtype) {
  const int batch = static_cast<int>(fill.size());
  std::vector<T> full;
  for (const T value : fill) {
    full.insert(full.end(), vocab, value);
  }
  const mx::array& places = inputs.at(name + ".places");
  if (places.size() > 0) {
    const Table where = read_table(places);
    const auto values = read_array<T>(inputs.at(name + ".values"));
    for (size_t i = 0; i < values.size(); i++) {
      const int row = where.at(static_cast<int>(i), 0), id = where.at(static_cast<int>(i), 1);
      full.at(static_cast<size_t>(row) * vocab + id) = values[i];
    }
  }
  return make_array(full, {batch, vocab}, dtype);
}

mx::array spread_bias(const NamedArrays& inputs, int vocab) {
  return spread(read_array<float>(inputs.at("bias.fill")), inputs, "bias", vocab, mx::float32);
}

mx::array spread_history(const NamedArrays& inputs, int batch, int vocab) {
  return spread(std::vector<int>(batch), inputs, "history", vocab, mx::int32);
}

}  // namespace funcrt
