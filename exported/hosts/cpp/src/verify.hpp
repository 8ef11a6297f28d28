#pragma once

#include "bundle.hpp"

namespace funcrt {

/// Repeat every golden call by the rules of exported/README.md, a line for each check on standard
/// output. Returns whether all passed. Raises Error for an incomplete golden file.
bool verify(Bundle& bundle);

}  // namespace funcrt
