#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace funcrt {

enum class Mode { generate, verify, info, help };

/// How to choose tokens: the settings of exported/README.md, the same for every prompt.
struct Settings {
  double temperature = 0;  // 0: greedy
  int top_k = 0;
  double top_p = 1;
  double min_p = 0;
  uint32_t seed = 0;
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;

  /// Whether the likeliest token of the raw logits is what they ask for.
  bool is_greedy() const {
    return temperature == 0 && repetition_penalty == 1 && presence_penalty == 0 &&
           frequency_penalty == 0;
  }
};

/// The command line.
struct Options {
  Mode mode = Mode::generate;
  std::string bundle;
  std::vector<std::vector<int>> prompts;  // ids
  int max_tokens = 128;
  Settings settings;
  std::string logits_file;  // empty: none
  std::vector<std::string> params_files;
  std::optional<bool> on_gpu;  // none: MLX's default device
};

extern const char* const kUsage;

/// Raises UsageError for what is unknown, missing or out of range.
Options parse_options(const std::vector<std::string>& arguments);

}  // namespace funcrt
