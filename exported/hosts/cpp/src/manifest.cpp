#include "manifest.hpp"

#include <algorithm>
#include <limits>
#include <set>

#include "error.hpp"
#include "mlx/version.h"
#include "node.hpp"

namespace mx = mlx::core;

namespace funcrt {
namespace {

constexpr const char* kManifest = "manifest.json";
constexpr uint64_t kLargestArray = uint64_t{1} << 48;

const std::vector<std::pair<std::string, mx::Dtype>> kDtypes = {
    {"bool", mx::bool_},       {"int8", mx::int8},         {"uint8", mx::uint8},
    {"int16", mx::int16},      {"uint16", mx::uint16},     {"int32", mx::int32},
    {"uint32", mx::uint32},    {"int64", mx::int64},       {"uint64", mx::uint64},
    {"float16", mx::float16},  {"bfloat16", mx::bfloat16}, {"float32", mx::float32}};

mx::Dtype read_dtype(const Node& node) {
  const std::string name = node.string();
  for (const auto& [known, dtype] : kDtypes) {
    if (known == name) {
      return dtype;
    }
  }
  node.fail("the name of a dtype");
}

ArraySpec read_array(const Node& node) {
  const auto sizes = node["shape"].list([](const Node& axis) { return axis.size(0); });
  uint64_t items = 1;
  for (const int size : sizes) {
    items *= static_cast<uint64_t>(size);
    if (items > kLargestArray) {
      node.fail("an array that fits in memory");
    }
  }
  return {node["name"].string(), mx::Shape(sizes.begin(), sizes.end()), read_dtype(node["dtype"])};
}

StateArray read_state(const Node& node) {
  StateArray array{node["name"].string(), node["kind"].string(), {}, read_dtype(node["dtype"]),
                   node["fill"].size(0)};
  array.shape = node["shape"].list([](const Node& axis) {
    try {
      return axis.size();
    } catch (const Error&) {
      const std::string name = axis.string();
      return name == "B"   ? StateArray::kBatch
             : name == "S" ? StateArray::kSlots
                           : (axis.fail("a size, \"B\" or \"S\""), 0);
    }
  });
  if (array.shape.empty() || array.shape[0] != StateArray::kBatch) {
    node.fail("an array whose first axis is \"B\"");
  }
  return array;
}

Function read_function(const Node& node) {
  Function function{};
  function.name = node["name"].string();
  function.file = node["file"].string();
  function.params = node["params"].string();
  if (const Node bucket = node["bucket"]; !bucket.is_null()) {
    function.bucket =
        Bucket{bucket["batch"].size(), bucket["tokens"].size(), bucket["capacity"].size(0)};
  }
  if (const std::set<std::string> known = {"stored", "prepared", "none"};
      !known.contains(function.params)) {
    node["params"].fail("\"stored\", \"prepared\" or \"none\"");
  }
  function.inputs = node["inputs"].list(read_array);
  function.state = node["state"].boolean();
  function.outputs = node["outputs"].list(read_array);
  if (node.has("grown") && !node["grown"].is_null()) {
    function.grown = node["grown"].size();
  }
  return function;
}

std::vector<int> read_sizes(const Node& node, int low) {
  auto sizes = node.list([low](const Node& item) { return item.size(low); });
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes.empty() ? (node.fail("at least one size"), sizes) : sizes;
}

GoldenCase read_case(const Node& node) {
  return {node["batch"].size(), node["capacity"].size(), node["calls"].list([](const Node& call) {
            return GoldenCall{call["function"].string(), call["tokens"].size(),
                              call["fresh"].boolean(),   call["undo"].boolean(),
                              call["scale"].number(std::numeric_limits<double>::min()),
                              call["eager"].number(0),   call["allowed"].number(0)};
          })};
}

bool is_safe(const std::string& path) {
  const std::filesystem::path parts(path);
  const bool climbs = std::any_of(parts.begin(), parts.end(), [](const auto& part) {
    return part == ".." || part == "." || part.empty();
  });
  return !path.empty() && !parts.is_absolute() && !climbs && path != kManifest &&
         path != "manifest.json.sha256" && path.find('\\') == std::string::npos &&
         path.find('\0') == std::string::npos;
}

FileEntry read_entry(const Node& node) {
  const bool has_header = node.has("header") && !node["header"].is_null();
  return {static_cast<uint64_t>(node["size"].integer(0, INT64_MAX)), node["sha256"].string(),
          has_header ? node["header"].string() : ""};
}

void check_schema(const Node& root, const std::string& where) {
  if (!root.has("format") || !root.has("schema_version") ||
      root["format"].string() != "funcrt-bundle") {
    throw Error(text(where, ": its manifest.json is not one of a funcrt bundle"));
  }
  const std::string version = root["schema_version"].string();
  const bool numbered = version.size() > 2 && version.rfind("3.", 0) == 0 &&
                        version.find_first_not_of("0123456789", 2) == std::string::npos;
  if (!numbered) {
    throw Error(text(where, ": schema version '", version, "' cannot be read, this host reads 3.x: "
                     "use the host that came with it, or export it again"));
  }
}

Node find_target(const Node& root, const std::string& where, const std::string& device) {
  const Node targets = root["targets"];
  if (!targets.has(device)) {
    throw Error(text(where, " has functions for ", join(targets.keys()), ", this process runs on ",
                     device, ": export it on such a device, or choose another --device"));
  }
  const Node target = targets[device];
  if (const std::string made = target["producer"]["mlx"].string(); made != mx::version()) {
    throw Error(text(where, " was made by MLX ", made, ", this process runs ", mx::version(),
                     ", and graphs do not survive a change of version: build funcrt_run against ",
                     "mlx==", made, ", or export the bundle again"));
  }
  return target;
}

void check_agreement(const Manifest& manifest) {
  std::vector<std::string> used = manifest.params_files;
  used.push_back(manifest.golden_file);
  for (const Function& function : manifest.functions) {
    used.push_back(function.file);
  }
  for (const std::string& path : used) {
    if (!manifest.files.contains(path)) {
      throw Error(text(kManifest, ": ", path, " is used but not among `files`"));
    }
  }
  if (manifest.cache.empty() || manifest.cache[0].name != "lengths" ||
      manifest.cache[0].shape.size() != 1 || manifest.cache[0].dtype != mx::int32) {
    throw Error(text(kManifest, ": cache must begin with lengths, int32 [B]"));
  }
}

}  // namespace

mx::Shape StateArray::sizes(int batch, int capacity) const {
  mx::Shape sizes;
  for (const int axis : shape) {
    sizes.push_back(axis == kBatch ? batch : axis == kSlots ? capacity : axis);
  }
  return sizes;
}

int StateArray::slot_axis() const {
  const auto found = std::find(shape.begin(), shape.end(), kSlots);
  return found == shape.end() ? -1 : static_cast<int>(found - shape.begin());
}

std::string Function::key() const {
  if (!bucket) {
    return name;
  }
  return text(name, "_b", bucket->batch, "_t", bucket->tokens, "_s", bucket->capacity);
}

const Function* Manifest::find(const std::string& name, std::optional<Bucket> bucket) const {
  for (const Function& function : functions) {
    if (function.name == name && function.bucket == bucket) {
      return &function;
    }
  }
  return nullptr;
}

const Function& Manifest::function(const std::string& name, std::optional<Bucket> bucket) const {
  if (const Function* found = find(name, bucket)) {
    return *found;
  }
  const Function wanted{name, "", "", bucket, {}, false, {}, {}};
  throw Error(text(kManifest, ": there is no function ", wanted.key(), ": export the bundle again"));
}

Manifest parse_manifest(const std::string& content, const std::string& where,
                        const std::string& device) {
  const nlohmann::json value = nlohmann::json::parse(content, nullptr, false);
  if (!value.is_object()) {
    throw Error(text(where, ": its manifest.json is not a JSON object"));
  }
  const Node root(value, kManifest);
  check_schema(root, where);
  const Node target = find_target(root, where, device);
  const Node model = root["model"], golden = target["golden"], plan = target["plan"];
  Manifest manifest{
      .vocab_size = root["vocab_size"].size(),
      .files = {},
      .params_files = root["params"]["files"].list([](const Node& n) { return n.string(); }),
      .stored = root["params"]["stored"].list(read_array),
      .eos_token_ids = {},
      .dtype = read_dtype(target["dtype"]),
      .plan = {read_sizes(plan["batch"], 1), read_sizes(plan["tokens"], 1),
               read_sizes(plan["capacity"], 2)},
      .cache = target["cache"].list(read_state),
      .prepared = target["prepared"].list(read_array),
      .functions = target["functions"].list(read_function),
      .golden_file = golden["file"].string(),
      .params_allowed = golden["params_allowed"].number(0),
      .cases = golden["cases"].list(read_case)};
  if (model.has("eos_token_ids") && !model["eos_token_ids"].is_null()) {
    manifest.eos_token_ids =
        model["eos_token_ids"].list([](const Node& item) { return item.size(0); });
  }
  for (const std::string& name : root["files"].keys()) {
    if (!is_safe(name)) {
      throw Error(text(kManifest, ": unsafe file path '", name, "'; paths stay inside the bundle"));
    }
    manifest.files.emplace(name, read_entry(root["files"][name]));
  }
  check_agreement(manifest);
  return manifest;
}

std::optional<std::vector<int>> parse_ends(const std::string& content) {
  const nlohmann::json value = nlohmann::json::parse(content, nullptr, false);
  if (!value.is_object() || !value.contains("eos_token_id") || value["eos_token_id"].is_null()) {
    return std::nullopt;
  }
  const Node ids = Node(value, "generation_config.json")["eos_token_id"];
  if (value["eos_token_id"].is_array()) {
    return ids.list([](const Node& item) { return item.size(0); });
  }
  return std::vector<int>{ids.size(0)};
}

std::string name_of(mx::Dtype dtype) {
  for (const auto& [name, known] : kDtypes) {
    if (known == dtype) {
      return name;
    }
  }
  return "another dtype";
}

std::ostream& operator<<(std::ostream& out, const ArraySpec& spec) {
  return out << spec.name << " " << name_of(spec.dtype) << " [" << join(spec.shape, ",") << "]";
}

}  // namespace funcrt
