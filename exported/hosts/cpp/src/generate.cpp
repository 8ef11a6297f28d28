#include "generate.hpp"

#include <algorithm>
#include <cmath>
#include <iostream>

#include "arrays.hpp"
#include "error.hpp"
#include "mlx/io.h"
#include "plan.hpp"

namespace mx = mlx::core;

namespace funcrt {
namespace {

constexpr double kTiny = 0x1p-126;  // the smallest normal float32: smaller ones may become 0

/// One text.
struct Row {
  const std::vector<int>* prompt;
  int limit;  // most new ids
  std::vector<int> ids{};
  int length = 0;  // tokens in the cache
  bool active = true;
  bool failed = false;                // its logits were not finite
  std::optional<mx::array> logits{};  // that its last id was chosen from

  int pending() const { return static_cast<int>(prompt->size()) - length; }
};

/// The texts of one batch, from their prompts to their ends.
///
/// The state is in the smallest capacity that holds every text, and grows when one needs more. Rows
/// without a text are idle: padding that changes nothing.
class Group {
 public:
  Group(Bundle& bundle, const Options& options, std::vector<Row> rows)
      : bundle_(bundle),
        options_(options),
        rows_(std::move(rows)),
        batch_(choose_batch(bundle.manifest().plan, static_cast<int>(rows_.size()))),
        vocab_(bundle.manifest().vocab_size),
        streams_(options.prompts.size() == 1) {
    set_settings();
  }

  std::vector<Row> run() {
    prefill();
    while (std::any_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.active; })) {
      decode();
    }
    return std::move(rows_);
  }

 private:
  void set_settings();
  void prefill();
  void decode();
  void fit();
  void take(const NamedArrays& chosen, const mx::array& logits);

  template <typename T, typename Value>
  mx::array per_row(Value value, mx::Dtype dtype) const {
    std::vector<T> values(batch_);
    for (size_t i = 0; i < rows_.size(); i++) {
      values[i] = static_cast<T>(value(rows_[i]));
    }
    return make_array(values, {batch_}, dtype);
  }

  Bundle& bundle_;
  const Options& options_;
  std::vector<Row> rows_;
  const int batch_, vocab_;
  const bool streams_;
  int capacity_ = 0;
  State state_;
  NamedArrays settings_;
};

/// The ten arrays of exported/README.md; unused rows have the same settings and an empty history.
void Group::set_settings() {
  const Settings& given = options_.settings;
  const auto put = [&](const char* name, auto value, mx::Dtype dtype) {
    settings_.emplace(name, mx::full({batch_}, value, dtype));
  };
  const auto keep = [](double value) { return value > 0 ? std::max(value, kTiny) : 0; };
  put("temperature", keep(given.temperature), mx::float32);
  put("top_k", given.top_k, mx::int32);
  put("top_p", keep(given.top_p), mx::float32);
  put("min_p", keep(given.min_p), mx::float32);
  put("seed", given.seed, mx::uint32);
  put("repetition_penalty", given.repetition_penalty, mx::float32);
  put("presence_penalty", given.presence_penalty, mx::float32);
  put("frequency_penalty", given.frequency_penalty, mx::float32);
  settings_.emplace("bias", mx::zeros({batch_, vocab_}, mx::float32));
  std::vector<int> history(static_cast<size_t>(batch_) * vocab_);
  for (size_t i = 0; i < rows_.size(); i++) {
    for (const int id : *rows_[i].prompt) {
      history[i * vocab_ + id] = 1;
    }
  }
  settings_.emplace("history", make_array(history, {batch_, vocab_}, mx::int32));
}

/// Feed all prompts in chunks, and choose each row's first id.
void Group::prefill() {
  const Plan& plan = bundle_.manifest().plan;
  int longest = 0;
  for (const Row& row : rows_) {
    longest = std::max(longest, row.pending());
  }
  capacity_ = choose_capacity(plan, longest);
  state_ = bundle_.init_state(batch_, capacity_);
  std::optional<mx::array> logits;  // [B,V], of each row's last token
  while (longest > 0) {
    const int width = choose_chunk(plan, longest, choose_overhead());
    std::vector<int> tokens(static_cast<size_t>(batch_) * width), valid(tokens.size());
    for (size_t i = 0; i < rows_.size(); i++) {
      Row& row = rows_[i];
      for (int t = 0; t < width && row.pending() > 0; t++) {
        tokens[i * width + t] = (*row.prompt)[row.length++];
        valid[i * width + t] = 1;
      }
    }
    const NamedArrays inputs = {{"tokens", make_array(tokens, {batch_, width}, mx::int32)},
                                {"valid", make_array(valid, {batch_, width}, mx::bool_)}};
    const Bucket bucket = {batch_, width, capacity_};
    // Faster, since it looks at no slots; not for small T, and not in older bundles.
    const bool first = !logits && bundle_.manifest().find("prefill_first", bucket);
    const char* name = first ? "prefill_first" : "prefill";
    const mx::array last = bundle_.call(name, bucket, inputs, state_).at("logits");
    const mx::array fed = mx::any(inputs.at("valid"), 1, true);
    logits = logits ? mx::where(fed, last, *logits) : last;
    logits->eval();
    longest = std::max(0, longest - width);
  }
  NamedArrays inputs = settings_;
  inputs.emplace("logits", *logits);
  inputs.emplace("positions", per_row<int>([](const Row& row) { return row.length; }, mx::int32));
  State none;
  take(bundle_.call("sample", {batch_, 1, 0}, inputs, none), *logits);
}

/// One more id for every active row.
void Group::decode() {
  fit();
  NamedArrays inputs = {
      {"token", per_row<int>([](const Row& row) { return row.ids.empty() ? 0 : row.ids.back(); },
                             mx::int32)},
      {"active", per_row<char>([](const Row& row) { return row.active; }, mx::bool_)}};
  const char* name = "decode_greedy";
  if (!options_.settings.is_greedy()) {
    name = "decode";
    inputs.insert(settings_.begin(), settings_.end());
  }
  for (Row& row : rows_) {
    row.length += row.active;
  }
  const NamedArrays chosen = bundle_.call(name, {batch_, 1, capacity_}, inputs, state_);
  take(chosen, chosen.at("logits"));
}

/// Make room for one token more in every active row.
void Group::fit() {
  int longest = 0;
  for (const Row& row : rows_) {
    longest = std::max(longest, row.active ? row.length + 1 : 0);
  }
  const auto& cache = bundle_.manifest().cache;
  const bool has_slots =
      std::any_of(cache.begin(), cache.end(), [](auto& entry) { return entry.slot_axis() >= 0; });
  while (longest > capacity_ - 1) {
    const Bucket bucket{batch_, 1, capacity_};
    const int grown = bundle_.manifest().function("grow", bucket).grown.value_or(capacity_);
    if (grown <= capacity_) {
      throw Error(text("manifest.json: grow from ", capacity_, " slots leads to ", grown,
                       ": export the bundle again"));
    }
    if (has_slots) {
      bundle_.call("grow", bucket, {}, state_);
    }
    capacity_ = grown;
  }
}

/// Record what a call chose for every active row. `logits` [B,V] are what it chose from.
void Group::take(const NamedArrays& chosen, const mx::array& logits) {
  const auto tokens = read_array<int>(chosen.at("tokens"));
  const auto finite = read_bools(chosen.at("finite"));
  const auto& ends = bundle_.eos_token_ids();
  if (const auto history = chosen.find("history"); history != chosen.end()) {
    settings_.insert_or_assign("history", history->second);
  }
  for (size_t i = 0; i < rows_.size(); i++) {
    Row& row = rows_[i];
    if (!row.active) {
      continue;
    }
    row.failed = !finite[i];
    if (!row.failed) {
      row.ids.push_back(tokens[i]);
      if (streams_) {
        std::cout << (row.ids.size() > 1 ? " " : "") << tokens[i] << std::flush;
      }
    }
    row.active = !row.failed && static_cast<int>(row.ids.size()) < row.limit &&
                 std::find(ends.begin(), ends.end(), tokens[i]) == ends.end();
    if (!row.active && !options_.logits_file.empty()) {
      const int index = static_cast<int>(i);
      row.logits = mx::contiguous(mx::slice(logits, {index, 0}, {index + 1, vocab_}));
      row.logits->eval();
    }
  }
}

std::vector<Row> make_rows(const Manifest& manifest, const Options& options) {
  std::vector<Row> rows;
  for (const std::vector<int>& prompt : options.prompts) {
    for (const int id : prompt) {
      if (id >= manifest.vocab_size) {
        throw Error(text("prompt ", rows.size(), ": token id ", id,
                         " is outside the vocabulary (0 to ", manifest.vocab_size - 1, ")"));
      }
    }
    const int size = static_cast<int>(prompt.size());
    choose_capacity(manifest.plan, size);
    // The last new token is never written to the cache.
    rows.push_back({&prompt, std::min(options.max_tokens, manifest.plan.capacity.back() - size)});
  }
  return rows;
}

void save_logits(const std::vector<Row>& rows, const std::string& file) {
  std::vector<mx::array> logits;
  for (const Row& row : rows) {
    logits.push_back(row.logits.value());
  }
  try {
    // By way of a writer, since MLX would change the name of a file.
    mx::save_safetensors(std::make_shared<mx::io::FileWriter>(file),
                         {{"logits", mx::concatenate(logits, 0)}});
  } catch (const std::exception& error) {
    throw Error(text("cannot write ", file, ": ", error.what()));
  }
}

}  // namespace

void generate(Bundle& bundle, const Options& options) {
  const std::vector<Row> rows = make_rows(bundle.manifest(), options);
  const size_t most = bundle.manifest().plan.batch.back();
  std::vector<Row> done;
  for (size_t begin = 0; begin < rows.size(); begin += most) {
    const auto first = rows.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = first + static_cast<std::ptrdiff_t>(std::min(most, rows.size() - begin));
    std::vector<Row> ended = Group(bundle, options, {first, last}).run();
    std::move(ended.begin(), ended.end(), std::back_inserter(done));
  }
  for (const Row& row : done) {
    std::cout << (done.size() > 1 ? join(row.ids, " ") : "") << "\n";
  }
  if (!std::cout.flush()) {
    throw Error("cannot write to standard output");
  }
  if (!options.logits_file.empty()) {
    save_logits(done, options.logits_file);
  }
  for (size_t i = 0; i < done.size(); i++) {
    if (done[i].failed) {
      throw Error(text("prompt ", i, ": the model's logits are not finite"));
    }
  }
}

}  // namespace funcrt
