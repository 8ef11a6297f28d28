#pragma once

#include "bundle.hpp"
#include "options.hpp"

namespace funcrt {

/// Complete the prompts of the options: ids to standard output, logits to a file if asked for.
///
/// Raises Error: ids out of range, prompts that no declared capacity holds, logits that are not
/// finite (once everything else is written).
void generate(Bundle& bundle, const Options& options);

}  // namespace funcrt
