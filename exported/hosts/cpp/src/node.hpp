#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "error.hpp"

namespace funcrt {

inline constexpr int64_t kLargestSize = std::numeric_limits<int>::max();  // MLX counts in int32

/// A place in a JSON file that knows its own name, so that messages can tell. Its readers raise
/// Error for values of another kind.
class Node {
 public:
  /// `file` is named in messages.
  Node(const nlohmann::json& value, std::string file) : Node(value, std::move(file), "") {}

  [[noreturn]] void fail(const std::string& wanted) const {
    throw Error(text(file_, ": ", path_, path_.empty() ? "" : ": ", "expected ", wanted,
                     "; export the bundle again"));
  }

  bool has(const std::string& key) const { return value_.is_object() && value_.contains(key); }
  bool is_null() const { return value_.is_null(); }

  Node operator[](const std::string& key) const {
    if (!has(key)) {
      fail(text("an object with '", key, "'"));
    }
    return {value_.at(key), file_, path_.empty() ? key : path_ + "." + key};
  }

  std::string string() const {
    return value_.is_string() ? value_.get<std::string>() : (fail("a text"), "");
  }

  bool boolean() const {
    return value_.is_boolean() ? value_.get<bool>() : (fail("true or false"), false);
  }

  double number(double low) const {
    const double number = value_.is_number() ? value_.get<double>() : std::nan("");
    return std::isfinite(number) && number >= low ? number
                                                  : (fail(text("a number from ", low, " up")), 0);
  }

  int64_t integer(int64_t low, int64_t high = kLargestSize) const {
    const bool fits = value_.is_number_integer() &&
                      (!value_.is_number_unsigned() || value_.get<uint64_t>() <= INT64_MAX);
    const int64_t number = fits ? value_.get<int64_t>() : 0;
    return fits && low <= number && number <= high
               ? number
               : (fail(text("a whole number from ", low, " to ", high)), 0);
  }

  int size(int low = 1) const { return static_cast<int>(integer(low)); }

  template <typename Read>
  auto list(Read read) const {
    if (!value_.is_array()) {
      fail("a list");
    }
    std::vector<decltype(read(*this))> items;
    for (size_t i = 0; i < value_.size(); i++) {
      items.push_back(read(Node(value_[i], file_, text(path_, "[", i, "]"))));
    }
    return items;
  }

  std::vector<std::string> keys() const {
    if (!value_.is_object()) {
      fail("an object");
    }
    std::vector<std::string> keys;
    for (const auto& [key, value] : value_.items()) {
      keys.push_back(key);
    }
    return keys;
  }

 private:
  Node(const nlohmann::json& value, std::string file, std::string path)
      : value_(value), file_(std::move(file)), path_(std::move(path)) {}

  const nlohmann::json& value_;
  std::string file_, path_;
};

}  // namespace funcrt
