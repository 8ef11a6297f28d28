#include "golden.hpp"

#include <algorithm>
#include <limits>

#include "arrays.hpp"
#include "mlx/ops.h"
#include "recorded.hpp"

namespace mx = mlx::core;

namespace funcrt {
namespace {

constexpr int kLogprob = -1;  // the column of a probe that asks for the chosen token's

/// Flat values of an array at some places.
std::vector<float> pick(const mx::array& array, const std::vector<int64_t>& places) {
  if (places.empty()) {
    return {};
  }
  const mx::array index = make_array(places, {static_cast<int>(places.size())}, mx::int64);
  mx::array picked = mx::take(mx::reshape(array, {-1}), index);
  if (array.dtype() == mx::uint32) {
    picked = mx::bitwise_and(picked, mx::array(0xFFFFFFU, mx::uint32));
  }
  return read_array<float>(mx::astype(picked, mx::float32));
}

std::vector<float> pick_probes(const NamedArrays& outputs, const Table& probes) {
  const bool is_top = outputs.contains("top_logprobs");
  const mx::array& table = outputs.at(is_top                      ? "top_logprobs"
                                      : outputs.contains("logits") ? "logits"
                                                                   : "logprobs");
  const bool has_logits = is_top || outputs.contains("logits");
  const size_t count = probes.values.size() / 2;
  std::vector<int64_t> places(count), rows(count);
  for (size_t i = 0; i < count; i++) {
    const int row = probes.at(static_cast<int>(i), 0), column = probes.at(static_cast<int>(i), 1);
    rows[i] = row;
    places[i] = has_logits ? int64_t{row} * table.shape(-1) + std::max(column, 0) : row;
  }
  std::vector<float> values = pick(table, places);
  if (outputs.contains("logprobs")) {
    const std::vector<float> logprobs = pick(outputs.at("logprobs"), rows);
    for (size_t i = 0; i < count; i++) {
      if (probes.at(static_cast<int>(i), 1) == kLogprob) {
        values[i] = logprobs[i];
      }
    }
  }
  return values;
}

/// The places whose chosen token is part of the text: the first real one of each row, and every
/// one whose guess, and all guesses before it, are the tokens that were chosen.
Table find_emitted(const Table& tokens, const Table& valid, const Table& chosen,
                   const Table& finite) {
  Table emitted{std::vector<int>(valid.values.size()), valid.width};
  for (size_t first = 0; first < valid.values.size(); first += valid.width) {
    int before = -1;
    for (int t = 0; t < valid.width; t++) {
      if (!valid.values[first + t]) {
        continue;
      }
      if (before >= 0 && !(tokens.values[first + t] == chosen.values[first + before] &&
                           finite.values[first + before])) {
        break;
      }
      emitted.values[first + t] = 1;
      before = t;
    }
  }
  return emitted;
}

/// In how many rows an output contradicts the tokens of the same call.
std::map<std::string, int> count_strange(const NamedArrays& outputs, const NamedArrays& inputs,
                                         int batch) {
  std::map<std::string, int> strange;
  if (!outputs.contains("accepted") && !outputs.contains("history")) {
    return strange;
  }
  const int width = static_cast<int>(outputs.at("tokens").size()) / batch;
  Table chosen = read_table(outputs.at("tokens")), finite = read_table(outputs.at("finite"));
  chosen.width = finite.width = width;
  Table counted{std::vector<int>(chosen.values.size(), 1), width};
  if (const auto active = inputs.find("active"); active != inputs.end()) {
    counted.values = read_table(active->second).values;
  }
  if (outputs.contains("accepted")) {
    counted = find_emitted(read_table(inputs.at("tokens")), read_table(inputs.at("valid")), chosen,
                           finite);
    const auto accepted = read_array<int>(outputs.at("accepted"));
    int& differ = strange["accepted"];
    for (int b = 0; b < batch; b++) {
      int count = 0;
      for (int t = 0; t < width; t++) {
        count += counted.at(b, t);
      }
      differ += accepted[b] != std::max(count - 1, 0);
    }
  }
  if (outputs.contains("history")) {
    Table expected = read_table(inputs.at("history"));
    const Table history = read_table(outputs.at("history"));
    int& differ = strange["history"];
    for (int b = 0; b < batch; b++) {
      const auto begin = expected.values.begin() + static_cast<std::ptrdiff_t>(b) * expected.width;
      for (int t = 0; t < width; t++) {
        begin[chosen.at(b, t)] += 2 * (counted.at(b, t) && finite.at(b, t));
      }
      differ += !std::equal(begin, begin + expected.width,
                            history.values.begin() + static_cast<std::ptrdiff_t>(b) * expected.width);
    }
  }
  return strange;
}

/// In how many rows growing changed what slots 0 to S-2 hold, or left other slots that are not 0.
int count_moved(const std::vector<StateArray>& cache, const State& before, const State& after) {
  mx::array moved = mx::zeros({before.at(0).shape(0)}, mx::bool_);
  for (size_t i = 0; i < cache.size(); i++) {
    mx::array expected = before[i];
    if (const int axis = cache[i].slot_axis(); axis >= 0) {
      mx::Shape start(expected.ndim(), 0), stop = expected.shape(), rest = after[i].shape();
      stop[axis] -= 1;  // not the old scratch slot
      rest[axis] -= stop[axis];
      expected = mx::concatenate(
          {mx::slice(expected, start, stop), mx::zeros(rest, expected.dtype())}, axis);
    }
    const mx::array differs = mx::not_equal(expected, after[i]);
    moved = mx::logical_or(moved, mx::any(mx::reshape(differs, {differs.shape(0), -1}), 1));
  }
  const auto rows = read_bools(moved);
  return static_cast<int>(std::count(rows.begin(), rows.end(), 1));
}

}  // namespace

Replay::Replay(Bundle& bundle, const GoldenCase& golden, const NamedArrays& arrays)
    : bundle_(bundle), case_(golden), arrays_(arrays) {}

Bucket Replay::bucket(const GoldenCall& call) const {
  const bool has_state = call.function != "sample" && call.function != "top";
  return {case_.batch, call.tokens, has_state ? case_.capacity : 0};
}

/// An empty state; where rows choose among adapters, all take the last.
State Replay::start() const {
  State state = bundle_.init_state(case_.batch, case_.capacity);
  const auto& cache = bundle_.manifest().cache;
  for (size_t i = 0; i < cache.size(); i++) {
    if (cache[i].name == "adapter") {
      state[i] = mx::full({case_.batch}, std::numeric_limits<int>::max(), mx::int32);
    }
  }
  return state;
}

NamedArrays Replay::take_inputs(const GoldenCall& call, const std::string& prefix) const {
  NamedArrays inputs;
  for (const auto& [name, array] : arrays_) {
    if (name.starts_with(prefix)) {
      inputs.emplace(name.substr(prefix.size()), array);
    }
  }
  const Manifest& manifest = bundle_.manifest();
  for (const ArraySpec& spec : manifest.function(call.function, bucket(call)).inputs) {
    if (spec.name == "mask") {
      const Table valid = read_table(inputs.at("valid"));
      inputs.insert_or_assign("mask",
                              make_mask(valid, read_array<int>(inputs.at("hidden")),
                                        read_array<int>(state_.at(0)), case_.capacity));
    } else if (spec.name == "block") {
      inputs.insert_or_assign("block", make_block(read_table(inputs.at("valid")), case_.batch));
    } else if (spec.name == "bias") {
      inputs.insert_or_assign("bias", spread_bias(inputs, manifest.vocab_size));
    } else if (spec.name == "history") {
      inputs.insert_or_assign("history", spread_history(inputs, case_.batch, manifest.vocab_size));
    } else if (spec.name == "logits" && !inputs.contains("logits")) {
      inputs.emplace("logits", inputs_.at("logits"));  // `top` takes those of the call before
    }
  }
  return inputs;
}

/// Put the arrays of rows and recurrent ones back, but not what records the past of a ring.
void Replay::undo(const State& saved) {
  const auto& cache = bundle_.manifest().cache;
  for (size_t i = 0; i < cache.size(); i++) {
    const StateArray& entry = cache[i];
    if ((entry.kind == "row" || entry.kind == "recurrent") && entry.name != "written") {
      state_[i] = saved[i];
    }
  }
}

Observation Replay::run(const GoldenCall& call, const std::string& prefix) {
  if (call.fresh) {
    state_.clear();  // before the next one exists: two states are not held at once
    state_ = start();
  }
  if (call.function == kGrow) {
    return grow(call);
  }
  inputs_ = take_inputs(call, prefix);
  State saved;
  if (call.undo) {
    saved = state_;  // it shares arrays, which the call then copies
  }
  const NamedArrays outputs = bundle_.call(call.function, bucket(call), inputs_, state_);
  Observation seen;
  seen.lengths = read_array<int>(state_.at(0));
  seen.accepted.assign(seen.lengths.size(), 0);
  if (const auto accepted = outputs.find("accepted"); accepted != outputs.end()) {
    seen.accepted = read_array<int>(accepted->second);
  }
  seen.values = pick_probes(outputs, read_table(inputs_.at("probes")));
  const char* tokens = outputs.contains("top_tokens") ? "top_tokens" : "tokens";
  seen.tokens = outputs.contains(tokens)
                    ? read_array<int>(outputs.at(tokens))
                    : read_array<int>(mx::astype(mx::argmax(outputs.at("logits"), -1), mx::int32));
  seen.strange = count_strange(outputs, inputs_, case_.batch);
  if (call.undo) {
    undo(saved);
  }
  return seen;
}

/// A state of the next capacity; the next call, if there is one, goes on with the one before.
Observation Replay::grow(const GoldenCall& call) {
  State larger = state_;
  bundle_.call(kGrow, bucket(call), {}, larger);
  Observation seen;
  seen.lengths = read_array<int>(larger.at(0));
  seen.strange["moved"] = count_moved(bundle_.manifest().cache, state_, larger);
  return seen;
}

std::vector<float> probe_params(const Bundle& bundle, const std::vector<int>& probes) {
  std::map<int, std::vector<int64_t>> places;
  for (size_t i = 0; i < probes.size(); i += 2) {
    places[probes[i]].push_back(probes[i + 1]);
  }
  std::vector<float> values;  // probes are sorted by array
  for (const auto& [index, own] : places) {
    const std::vector<float> picked = pick(bundle.prepared().at(index), own);
    values.insert(values.end(), picked.begin(), picked.end());
  }
  return values;
}

}  // namespace funcrt
