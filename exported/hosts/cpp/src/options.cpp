#include "options.hpp"

#include <cctype>
#include <charconv>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>

#include "error.hpp"

namespace funcrt {

const char* const kUsage =
    R"(funcrt_run BUNDLE --prompt-ids IDS [--prompt-ids IDS ...]   complete prompts
funcrt_run BUNDLE --verify                                  repeat the golden calls
funcrt_run BUNDLE --info                                    list BLAS, MLX and functions

New ids go to standard output, separated by spaces: one line for each prompt, in order. Those of a
single prompt appear as they come. A text ends with an id that ends it, after --max-tokens, or
where the largest exported capacity is full.

  --prompt-ids 504,3575,282    ids of a prompt; once for each
  --max-tokens N               most new ids of each prompt (128)
  --temperature X              0: the likeliest token (0)
  --top-k N, --top-p X, --min-p X, --repetition-penalty X, --presence-penalty X,
  --frequency-penalty X        see "Settings" of exported/README.md (all off)
  --seed N                     draws depend on it and on the position only (0)
  --logits FILE                write the logits that each last id was chosen from, [prompts, V]
                               under the name "logits" (safetensors)
  --params FILE                weights in place of the bundle's, or of a bundle without any;
                               once for each safetensors file
  --device cpu|gpu             where to run (MLX's default device)
  --help                       this text

FUNCRT_BLAS chooses the BLAS on a Linux CPU: a library file, system, scipy or none.
)";

namespace {

bool read(const std::string& word, double& number) {  // not all libraries have from_chars for it
  char* end = nullptr;
  number = std::strtod(word.c_str(), &end);
  return !word.empty() && !std::isspace(static_cast<unsigned char>(word[0])) &&
         end == word.c_str() + word.size();
}

template <typename Whole>
bool read(const std::string& word, Whole& number) {
  const char* end = word.data() + word.size();
  const auto result = std::from_chars(word.data(), end, number);
  return result.ec == std::errc() && result.ptr == end && !word.empty();
}

template <typename Number>
Number parse_number(const std::string& name, const std::string& word, Number low, Number high,
                    const char* wanted) {
  Number number{};
  if (!read(word, number) || !(number >= low && number <= high)) {  // NaN is in no range
    throw UsageError(text(name, ": expected ", wanted, ", got '", word, "'"));
  }
  return number;
}

std::vector<int> parse_ids(const std::string& word) {
  std::vector<int> ids;
  if (word.empty()) {
    throw UsageError("--prompt-ids: the prompt is empty: pass at least one id");
  }
  std::istringstream items(word + ",");
  for (std::string item; std::getline(items, item, ',');) {
    ids.push_back(parse_number("--prompt-ids", item, 0, std::numeric_limits<int>::max(),
                               "ids as 504,3575,282"));
  }
  return ids;
}

/// What each option that takes a value does with it.
std::map<std::string, std::function<void(const std::string&)>> make_readers(Options& options) {
  Settings& settings = options.settings;
  constexpr int most = std::numeric_limits<int>::max();
  constexpr double tiny = std::numeric_limits<double>::denorm_min();
  const auto real = [](const char* name, double& value, double low, double high,
                       const char* wanted) {
    return [=, &value](const std::string& word) {
      value = parse_number(name, word, low, high, wanted);
    };
  };
  const char* penalty = "a number from -1e6 to 1e6 (0 is off)";
  return {
      {"--prompt-ids", [&](auto& word) { options.prompts.push_back(parse_ids(word)); }},
      {"--max-tokens",
       [&](auto& word) {
         options.max_tokens = parse_number("--max-tokens", word, 1, most, "a number from 1 up");
       }},
      {"--temperature", real("--temperature", settings.temperature, 0, 3.4e38,
                             "a number from 0 (greedy) up")},
      {"--top-k",
       [&](auto& word) {
         settings.top_k = parse_number("--top-k", word, 0, most, "a number from 0 (off) up");
       }},
      {"--top-p", real("--top-p", settings.top_p, tiny, 1, "a number above 0, at most 1 (off)")},
      {"--min-p", real("--min-p", settings.min_p, 0, 1, "a number from 0 (off) to 1")},
      {"--seed",
       [&](auto& word) {
         settings.seed = parse_number<uint32_t>("--seed", word, 0, 4294967295U,
                                                "a number from 0 to 2**32 - 1");
       }},
      {"--repetition-penalty", real("--repetition-penalty", settings.repetition_penalty, 1e-6, 1e6,
                                    "a number from 1e-6 to 1e6 (1 is off)")},
      {"--presence-penalty",
       real("--presence-penalty", settings.presence_penalty, -1e6, 1e6, penalty)},
      {"--frequency-penalty",
       real("--frequency-penalty", settings.frequency_penalty, -1e6, 1e6, penalty)},
      {"--logits", [&](auto& word) { options.logits_file = word; }},
      {"--params", [&](auto& word) { options.params_files.push_back(word); }},
      {"--device",
       [&](auto& word) {
         if (word != "cpu" && word != "gpu") {
           throw UsageError(text("--device: expected cpu or gpu, got '", word, "'"));
         }
         options.on_gpu = word == "gpu";
       }},
  };
}

void check(const Options& options) {
  if (options.mode == Mode::help) {
    return;
  }
  if (options.bundle.empty()) {
    throw UsageError("expected the folder of a bundle: see --help");
  }
  if (options.mode == Mode::generate && options.prompts.empty()) {
    throw UsageError("expected --prompt-ids, --verify or --info: see --help");
  }
  if (options.mode != Mode::generate && !(options.prompts.empty() && options.logits_file.empty())) {
    throw UsageError("--verify and --info take no prompts");
  }
}

}  // namespace

Options parse_options(const std::vector<std::string>& arguments) {
  Options options;
  const auto readers = make_readers(options);
  const std::map<std::string, Mode> modes = {
      {"--verify", Mode::verify}, {"--info", Mode::info}, {"--help", Mode::help}, {"-h", Mode::help}};
  for (size_t i = 0; i < arguments.size(); i++) {
    const std::string& word = arguments[i];
    if (!word.starts_with('-')) {
      if (word.empty() || !options.bundle.empty()) {
        throw UsageError(text("unexpected argument '", word, "': see --help"));
      }
      options.bundle = word;
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    if (const auto mode = modes.find(word); mode != modes.end()) {
      options.mode = mode->second;
    } else if (const auto reader = readers.find(name); reader == readers.end()) {
      throw UsageError(text("unknown option ", name, ": see --help"));
    } else if (equals != std::string::npos) {
      reader->second(word.substr(equals + 1));
    } else if (++i < arguments.size()) {
      reader->second(arguments[i]);
    } else {
      throw UsageError(text(name, ": expected a value"));
    }
  }
  check(options);
  return options;
}

}  // namespace funcrt
