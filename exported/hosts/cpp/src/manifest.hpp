#pragma once

#include <compare>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "files.hpp"
#include "mlx/array.h"

namespace funcrt {

struct ArraySpec {
  std::string name;
  mlx::core::Shape shape;
  mlx::core::Dtype dtype;
};

/// One array of the cache state; an empty state holds `fill` everywhere.
struct StateArray {
  static constexpr int kBatch = -1, kSlots = -2;  // in `shape`

  std::string name, kind;
  std::vector<int> shape;
  mlx::core::Dtype dtype;
  int fill;

  mlx::core::Shape sizes(int batch, int capacity) const;

  /// The axis that has S slots; -1 without one.
  int slot_axis() const;
};

struct Bucket {
  int batch, tokens, capacity;

  auto operator<=>(const Bucket&) const = default;
};

/// One exported function.
struct Function {
  std::string name, file, params;
  std::optional<Bucket> bucket;
  std::vector<ArraySpec> inputs;
  bool state;
  std::vector<ArraySpec> outputs;
  std::optional<int> grown;

  /// As `decode_b1_t1_s512`.
  std::string key() const;
};

struct GoldenCall {
  std::string function;
  int tokens;
  bool fresh, undo;
  double scale, eager, allowed;
};

struct GoldenCase {
  int batch, capacity;
  std::vector<GoldenCall> calls;
};

/// The declared sizes, ascending.
struct Plan {
  std::vector<int> batch, tokens, capacity;
};

/// What `manifest.json` says about a bundle, and about one of its device classes.
struct Manifest {
  int vocab_size;
  std::map<std::string, FileEntry> files;
  std::vector<std::string> params_files;
  std::vector<ArraySpec> stored;
  std::vector<int> eos_token_ids;  // of the model's config

  mlx::core::Dtype dtype;
  Plan plan;
  std::vector<StateArray> cache;
  std::vector<ArraySpec> prepared;
  std::vector<Function> functions;
  std::string golden_file;
  double params_allowed;
  std::vector<GoldenCase> cases;

  /// Null where there is no such function.
  const Function* find(const std::string& name, std::optional<Bucket> bucket) const;

  /// Raises Error where there is no such function.
  const Function& function(const std::string& name, std::optional<Bucket> bucket) const;

  const FileEntry& file(const std::string& name) const { return files.at(name); }
};

/// Read a manifest whose hash was checked.
///
/// Raises Error for another schema, another version of MLX, no functions for `device`, or anything
/// that contradicts itself. `where` names the bundle in messages.
Manifest parse_manifest(const std::string& json, const std::string& where,
                        const std::string& device);

/// The ids that end a text, of a `generation_config.json`; none where it names none.
std::optional<std::vector<int>> parse_ends(const std::string& json);

std::string name_of(mlx::core::Dtype dtype);
std::ostream& operator<<(std::ostream& out, const ArraySpec& spec);

}  // namespace funcrt
