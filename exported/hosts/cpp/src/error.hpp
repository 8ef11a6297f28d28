#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace funcrt {

/// What went wrong and what to do, in one line. The process ends with exit code 1.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A command line that cannot be meant. The process ends with exit code 2.
struct UsageError : Error {
  using Error::Error;
};

/// Everything that `<<` can write, one after the other.
template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// Items with something between them.
template <typename Items>
std::string join(const Items& items, const char* between = ", ") {
  std::ostringstream out;
  const char* before = "";
  for (const auto& item : items) {
    out << before << item;
    before = between;
  }
  return out.str();
}

}  // namespace funcrt
