#pragma once

#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "files.hpp"
#include "manifest.hpp"
#include "mlx/array.h"
#include "safetensors.hpp"

namespace funcrt {

/// The arrays of a cache state, in the order of the manifest.
using State = std::vector<mlx::core::array>;

/// The device class whose functions the default device runs: "cpu", "cuda" or "metal".
std::string device_class();

/// An exported model, run through its own graphs, which are compiled when first used.
class Bundle {
 public:
  /// Check and load a bundle for the default device.
  ///
  /// Nothing reaches MLX before its size and hash were compared with the manifest. Of weights this
  /// is the header alone, unless `in_full`: then every file of the bundle is hashed.
  ///
  /// `params_files` hold weights in place of the bundle's, or those of a bundle without any.
  ///
  /// Raises Error: in one line, what is wrong and what to do.
  Bundle(const std::string& folder, const std::vector<std::string>& params_files, bool in_full);

  const Manifest& manifest() const { return manifest_; }
  const std::vector<int>& eos_token_ids() const { return eos_token_ids_; }

  /// What the exported `prepare` made of the weights.
  const std::vector<mlx::core::array>& prepared() const { return prepared_; }

  /// The arrays of the golden file.
  NamedArrays load_golden() const;

  State init_state(int batch, int capacity) const;

  /// Run a function: outputs by name; `state` becomes the new one.
  ///
  /// Everything is evaluated, and nothing holds the old state meanwhile, so that it is updated in
  /// place. `inputs` may hold more than the function takes.
  NamedArrays call(const std::string& name, Bucket bucket, const NamedArrays& inputs, State& state);

 private:
  using Graph = std::function<std::vector<mlx::core::array>(const std::vector<mlx::core::array>&)>;

  void read_graphs();
  std::vector<mlx::core::array> load_weights(const std::vector<std::string>& files, bool in_full);
  void prepare(std::vector<mlx::core::array> stored);
  Graph import_graph(const Function& function);
  const Graph& compiled(const Function& function);

  Folder folder_;
  std::string recorded_;  // content of manifest.json.sha256
  Manifest manifest_;
  std::vector<int> eos_token_ids_;
  std::map<std::string, std::string> graphs_;  // bytes of those that are not imported yet, by file
  std::vector<mlx::core::array> prepared_;
  std::unordered_map<std::string, Graph> compiled_;  // by file
};

}  // namespace funcrt
