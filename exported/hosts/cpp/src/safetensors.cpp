#include "safetensors.hpp"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "error.hpp"
#include "mlx/io.h"
#include "sha256.hpp"

namespace fs = std::filesystem;

namespace funcrt {
namespace {

constexpr uint64_t kMostHeaderBytes = 100'000'000;  // the format's own limit

const std::map<std::string, uint64_t> kItemBytes = {
    {"BOOL", 1}, {"I8", 1},  {"U8", 1},  {"I16", 2}, {"U16", 2}, {"F16", 2}, {"BF16", 2},
    {"I32", 4},  {"U32", 4}, {"F32", 4}, {"I64", 8}, {"U64", 8}, {"F64", 8}};

/// The 8 bytes of the header's length, and the header. `room`: how many bytes of data follow.
std::string read_header(const std::string& path, uint64_t& room) {
  std::ifstream file(path, std::ios::binary);
  std::error_code error;
  const uint64_t size = fs::file_size(path, error);
  std::string header(8, '\0');
  if (error || !file || !file.read(header.data(), 8)) {
    throw Error(text(path, ": cannot be read, or is not a safetensors file"));
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; i--) {
    length = length << 8 | static_cast<unsigned char>(header[i]);
  }
  if (length > std::min(size - 8, kMostHeaderBytes)) {
    throw Error(text(path, ": truncated, or not a safetensors file"));
  }
  header.resize(8 + length);
  if (!file.read(header.data() + 8, static_cast<std::streamsize>(length))) {
    throw Error(text(path, ": truncated, or not a safetensors file"));
  }
  room = size - 8 - length;
  return header;
}

using Spans = std::vector<std::pair<uint64_t, uint64_t>>;

/// Whether an entry agrees with itself; its bytes are added to `spans`.
bool is_sound(const nlohmann::json& entry, uint64_t room, Spans& spans) {
  const auto item = kItemBytes.find(entry.at("dtype").get<std::string>());
  if (item == kItemBytes.end()) {
    return false;
  }
  uint64_t size = item->second;
  for (const auto& axis : entry.at("shape")) {
    const auto length = axis.get<int64_t>();
    if (!axis.is_number_integer() || length < 0 || length > INT32_MAX ||
        __builtin_mul_overflow(size, static_cast<uint64_t>(length), &size)) {
      return false;
    }
  }
  const auto& span = entry.at("data_offsets");
  if (span.size() != 2 || !span[0].is_number_unsigned() || !span[1].is_number_unsigned()) {
    return false;
  }
  const auto first = span[0].get<uint64_t>(), last = span[1].get<uint64_t>();
  spans.emplace_back(first, last);
  return first <= last && last <= room && last - first == size;
}

/// Raise Error unless all entries are sound, and fill the file without overlap.
void check(const std::string& path, const std::string& header, uint64_t room) {
  const auto entries = nlohmann::json::parse(header.begin() + 8, header.end(), nullptr, false);
  if (!entries.is_object()) {
    throw Error(text(path, ": not a safetensors file: its header is not a JSON object"));
  }
  Spans spans;
  for (const auto& [name, entry] : entries.items()) {
    bool sound = false;
    try {
      sound = name == "__metadata__" || is_sound(entry, room, spans);
    } catch (const nlohmann::json::exception&) {
    }
    if (!sound) {
      throw Error(text(path, ": damaged entry for ", name));
    }
  }
  std::sort(spans.begin(), spans.end());
  uint64_t end = 0;
  for (const auto& [first, last] : spans) {
    end = first == end ? last : room + 1;
  }
  if (end != room) {
    throw Error(text(path, ": damaged: its tensors do not fill it without overlap"));
  }
}

}  // namespace

NamedArrays load_safetensors(const std::string& path, const std::string& expected) {
  uint64_t room = 0;
  const std::string header = read_header(path, room);
  if (!expected.empty() && sha256(header) != expected) {
    throw Error(text(path, " is damaged: the sha256 of its header does not match manifest.json; "
                           "copy the bundle again, or export it again"));
  }
  check(path, header, room);
  try {
    return mlx::core::load_safetensors(path).first;
  } catch (const std::exception& error) {
    throw Error(text("cannot read ", path, ": ", error.what()));
  }
}

}  // namespace funcrt
