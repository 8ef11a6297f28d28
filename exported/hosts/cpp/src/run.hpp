#pragma once

#include <iostream>
#include <string>

#include "options.hpp"

namespace funcrt {

/// The part that is linked to MLX: does what the options say and returns the exit code.
using Run = int(const Options&, const std::string& blas);
inline constexpr const char* kRunName = "funcrt_run_options";

/// Write an error as one line and return the exit code.
inline int report(std::string message, int code) {
  for (char& letter : message) {
    letter = letter == '\n' || letter == '\r' ? ' ' : letter;
  }
  std::cout.flush();
  std::cerr << "funcrt_run: " << message << std::endl;
  return code;
}

}  // namespace funcrt
