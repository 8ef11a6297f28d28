#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bundle.hpp"

namespace funcrt {

inline constexpr const char* kGrow = "grow";

/// What is compared of one call; N probes, R rows of outputs. Of `grow` only what is strange.
struct Observation {
  std::vector<float> values;             // [N], logits or log-probabilities at the probes
  std::vector<int> tokens;               // [R], the likeliest or the chosen ones
  std::vector<int> lengths;              // [B], after the call
  std::vector<int> accepted;             // [B], right guesses; 0 where there are none
  std::map<std::string, int> strange;    // by what contradicts itself: in how many rows
};

/// Runs the calls of one golden case, passing the cache state on.
class Replay {
 public:
  /// `arrays` are those of the golden file.
  Replay(Bundle& bundle, const GoldenCase& golden, const NamedArrays& arrays);

  /// Run a call whose arrays are named `prefix` + NAME.
  Observation run(const GoldenCall& call, const std::string& prefix);

  Bucket bucket(const GoldenCall& call) const;

 private:
  NamedArrays take_inputs(const GoldenCall& call, const std::string& prefix) const;
  State start() const;
  Observation grow(const GoldenCall& call);
  void undo(const State& saved);

  Bundle& bundle_;
  const GoldenCase& case_;
  const NamedArrays& arrays_;
  State state_;
  NamedArrays inputs_;  // of the last call
};

/// Values of the prepared weights at the probes of the golden file. Of packed integers the lower 24
/// bits, which float32 holds exactly.
std::vector<float> probe_params(const Bundle& bundle, const std::vector<int>& probes);

}  // namespace funcrt
