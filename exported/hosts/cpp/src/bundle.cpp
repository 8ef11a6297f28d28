#include "bundle.hpp"

#include <algorithm>

#include "error.hpp"
#include "mlx/backend/metal/metal.h"
#include "mlx/compile.h"
#include "mlx/export.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "sha256.hpp"

namespace mx = mlx::core;

namespace funcrt {
namespace {

constexpr const char* kDigest = "manifest.json.sha256";

/// The manifest, and in `recorded` the content of the file that holds its hash.
Manifest read_manifest(const Folder& folder, std::string& recorded) {
  const std::string where = folder.path().string();
  std::string content;
  try {
    content = read_file(folder.path() / "manifest.json");
    recorded = read_file(folder.path() / kDigest);
  } catch (const Error& error) {
    throw Error(text(where, " is not a bundle: ", error.what()));
  }
  if (recorded != sha256(content) + "  manifest.json\n") {
    throw Error(text((folder.path() / "manifest.json").string(), " does not match ", kDigest,
                     ": damaged; copy the bundle again, or export it again"));
  }
  return parse_manifest(content, where, device_class());
}

bool is_float(mx::Dtype dtype) {
  return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
}

/// An array that stands for a stored one; floats are cast. Raises Error for another.
mx::array fit(const ArraySpec& spec, const mx::array& array) {
  const bool both = is_float(spec.dtype) && is_float(array.dtype());
  if (array.shape() != spec.shape || !(both || array.dtype() == spec.dtype)) {
    throw Error(text("weights do not fit the exported functions: expected ", spec, ", got ",
                     ArraySpec{spec.name, array.shape(), array.dtype()}));
  }
  return mx::astype(array, spec.dtype);
}

}  // namespace

std::string device_class() {
  if (mx::default_device() == mx::Device::cpu) {
    return "cpu";
  }
  return mx::metal::is_available() ? "metal" : "cuda";
}

Bundle::Bundle(const std::string& folder, const std::vector<std::string>& params_files,
               bool in_full)
    : folder_(folder), manifest_(read_manifest(folder_, recorded_)) {
  for (const auto& [name, entry] : manifest_.files) {
    folder_.check_size(name, entry);
  }
  for (const auto& [name, entry] : manifest_.files) {
    if (in_full) {
      folder_.check_hash(name, entry);
    }
  }
  read_graphs();
  eos_token_ids_ = manifest_.eos_token_ids;
  if (const auto found = manifest_.files.find("generation_config.json");
      found != manifest_.files.end()) {
    eos_token_ids_ = parse_ends(folder_.read(found->first, found->second)).value_or(eos_token_ids_);
  }
  std::vector<mx::array> stored = load_weights(params_files, in_full);
  if (read_file(folder_.path() / kDigest) != recorded_) {
    throw Error(text(folder, " was replaced while it was read: run it again"));
  }
  prepare(std::move(stored));
}

/// Held in memory, so that a bundle that is replaced later still runs.
void Bundle::read_graphs() {
  for (const Function& function : manifest_.functions) {
    graphs_.emplace(function.file, folder_.read(function.file, manifest_.file(function.file)));
  }
}

NamedArrays Bundle::load_golden() const {
  const std::string& name = manifest_.golden_file;
  const TemporaryFile copy(folder_.read(name, manifest_.file(name)));
  NamedArrays arrays = load_safetensors(copy.path());
  for (auto& [key, array] : arrays) {
    array.eval();
  }
  return arrays;
}

std::vector<mx::array> Bundle::load_weights(const std::vector<std::string>& files, bool in_full) {
  NamedArrays found;
  for (const std::string& name : manifest_.params_files) {
    const FileEntry& entry = manifest_.file(name);
    if (entry.header.empty() && !in_full) {
      folder_.check_hash(name, entry);
    }
    found.merge(load_safetensors((folder_.path() / name).string(), entry.header));
  }
  std::map<std::string, const ArraySpec*> known;
  for (const ArraySpec& spec : manifest_.stored) {
    known.emplace(spec.name, &spec);
  }
  for (const std::string& file : files) {
    for (auto& [name, array] : load_safetensors(file)) {
      if (!known.contains(name)) {
        throw Error(text(file, ": the bundle takes no tensor ", name));
      }
      found.insert_or_assign(name, array);
    }
  }
  if (manifest_.params_files.empty() && files.empty()) {
    throw Error(text(folder_.path().string(), " holds no weights: pass them as --params FILE"));
  }
  std::vector<mx::array> stored;
  for (const ArraySpec& spec : manifest_.stored) {
    const auto array = found.find(spec.name);
    if (array == found.end()) {
      throw Error(text("the weights have no ", spec, ": pass them all as --params FILE"));
    }
    stored.push_back(fit(spec, array->second));
  }
  return stored;
}

void Bundle::prepare(std::vector<mx::array> stored) {
  const Function& function = manifest_.function("prepare", std::nullopt);
  prepared_ = import_graph(function)(stored);
  stored.clear();  // not held beside what is made of them
  bool sound = prepared_.size() == manifest_.prepared.size();
  for (size_t i = 0; sound && i < prepared_.size(); i++) {
    const ArraySpec& spec = manifest_.prepared[i];
    sound = prepared_[i].shape() == spec.shape && prepared_[i].dtype() == spec.dtype;
  }
  if (!sound) {
    throw Error(text(function.file, " returns other weights than the manifest lists"));
  }
  for (mx::array& array : prepared_) {  // so that only one's intermediates exist at a time
    array.eval();
  }
}

/// A graph that is called with arrays of the shapes that it was traced with.
Bundle::Graph Bundle::import_graph(const Function& function) {
  const auto bytes = graphs_.extract(function.file);
  try {
    const TemporaryFile copy(bytes.mapped());
    const mx::ImportedFunction imported = mx::import_function(copy.path());
    return [imported](const std::vector<mx::array>& arguments) { return imported(arguments); };
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(text("cannot import ", function.file, ": ", error.what()));
  }
}

const Bundle::Graph& Bundle::compiled(const Function& function) {
  const auto found = compiled_.find(function.file);
  if (found != compiled_.end()) {
    return found->second;
  }
  std::vector<mx::array> params;
  if (function.params == "prepared") {
    params = prepared_;
  }
  // Captured, so that a call passes only what changes.
  const Graph bound = [graph = import_graph(function),
                       params](const std::vector<mx::array>& arguments) {
    std::vector<mx::array> all = params;
    all.insert(all.end(), arguments.begin(), arguments.end());
    return graph(all);
  };
  return compiled_.emplace(function.file, mx::compile(bound)).first->second;
}

State Bundle::init_state(int batch, int capacity) const {
  State state;
  for (const StateArray& entry : manifest_.cache) {
    state.push_back(mx::full(entry.sizes(batch, capacity), entry.fill, entry.dtype));
  }
  return state;
}

NamedArrays Bundle::call(const std::string& name, Bucket bucket, const NamedArrays& inputs,
                         State& state) {
  const Function& function = manifest_.function(name, bucket);
  std::vector<mx::array> arguments;
  for (const ArraySpec& spec : function.inputs) {
    const auto input = inputs.find(spec.name);
    if (input == inputs.end()) {
      throw Error(text(function.key(), " takes an input that this host does not know: ", spec));
    }
    if (input->second.shape() != spec.shape || input->second.dtype() != spec.dtype) {
      throw Error(text(function.key(), ": expected ", spec, ", got ",
                       ArraySpec{spec.name, input->second.shape(), input->second.dtype()}));
    }
    arguments.push_back(mx::contiguous(input->second));
  }
  const size_t held = function.state ? state.size() : 0;
  if (function.state) {
    std::move(state.begin(), state.end(), std::back_inserter(arguments));
    state.clear();
  }
  std::vector<mx::array> results = compiled(function)(arguments);
  arguments.clear();  // nothing else may hold the old state now, or MLX copies it
  if (results.size() != function.outputs.size() + held) {
    throw Error(text(function.key(), " returns ", results.size(), " arrays, the manifest lists ",
                     function.outputs.size() + held));
  }
  mx::eval(results);
  NamedArrays outputs;
  for (size_t i = 0; i < function.outputs.size(); i++) {
    outputs.emplace(function.outputs[i].name, results[i]);
  }
  if (function.state) {
    state.assign(results.end() - static_cast<std::ptrdiff_t>(held), results.end());
  }
  return outputs;
}

}  // namespace funcrt
