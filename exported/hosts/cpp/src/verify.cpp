#include "verify.hpp"

#include <cmath>
#include <cstdio>
#include <iostream>
#include <limits>

#include "arrays.hpp"
#include "error.hpp"
#include "golden.hpp"

namespace mx = mlx::core;

namespace funcrt {
namespace {

constexpr size_t kMostListed = 8;

/// One measured number and the largest one that passes, on a line of their own.
class Checks {
 public:
  void add(const std::string& function, const std::string& check, double measured, double allowed,
           const std::string& note = "") {
    const bool passed = measured <= allowed;
    all_passed_ = all_passed_ && passed;
    char numbers[80];
    std::snprintf(numbers, sizeof numbers, "%.3g (at most %.3g)", measured, allowed);
    std::cout << (passed ? "ok     " : "FAILED ") << function << " " << check << " " << numbers
              << (note.empty() ? "" : " " + note) << std::endl;
  }

  bool all_passed() const { return all_passed_; }

 private:
  bool all_passed_ = true;
};

/// Largest difference over `scale`, one for all or one for each; infinite if anything is not a
/// number. Both may be -inf, as for ids that never come.
double measure_error(const std::vector<float>& values, const std::vector<float>& reference,
                     const std::vector<float>& scale) {
  if (values.size() != reference.size()) {
    throw Error("the golden file has other references than probes: export the bundle again");
  }
  float worst = 0;
  for (size_t i = 0; i < values.size(); i++) {
    const float divisor = scale[scale.size() > 1 ? i : 0];
    const float error =
        values[i] == reference[i] ? 0 : std::fabs(values[i] - reference[i]) / divisor;
    if (!std::isfinite(error)) {
      return std::numeric_limits<double>::infinity();
    }
    worst = std::max(worst, error);
  }
  return worst;
}

std::string list_ties(const std::vector<size_t>& rows) {
  if (rows.empty()) {
    return "";
  }
  const std::vector<size_t> listed(rows.begin(), rows.begin() + std::min(rows.size(), kMostListed));
  return text("near ties in rows ", join(listed), rows.size() > kMostListed ? " ..." : "");
}

void check_params(const Bundle& bundle, const NamedArrays& arrays, Checks& checks) {
  const auto probes = read_array<int>(arrays.at("prepare.probes"));
  const double error = measure_error(probe_params(bundle, probes),
                                     read_array<float>(arrays.at("prepare.reference")),
                                     read_array<float>(arrays.at("prepare.scale")));
  checks.add("prepare", "error", error, bundle.manifest().params_allowed);
}

void check_choices(const std::string& key, const GoldenCall& call, const Observation& seen,
                   const NamedArrays& arrays, const std::string& prefix, Checks& checks) {
  const auto scale = static_cast<float>(call.scale);
  const double error =
      measure_error(seen.values, read_array<float>(arrays.at(prefix + "reference")), {scale});
  checks.add(key, "error", error, call.allowed);
  const auto expected = read_array<int>(arrays.at(prefix + "expected_tokens"));
  const auto gaps = read_array<float>(arrays.at(prefix + "gaps"));
  if (expected.size() != seen.tokens.size() || gaps.size() != expected.size()) {
    throw Error(text(key, " returns ", seen.tokens.size(), " tokens, recorded are ",
                     expected.size(), ": export the bundle again"));
  }
  int differ = 0;
  std::vector<size_t> ties;
  for (size_t row = 0; row < expected.size(); row++) {
    if (expected[row] >= 0 && seen.tokens[row] != expected[row]) {
      const bool close = gaps[row] < static_cast<float>(2 * error * call.scale);
      close ? ties.push_back(row) : void(differ++);
    }
  }
  checks.add(key, "tokens", differ, 0, list_ties(ties));
}

void check_lengths(const std::string& key, const Observation& seen, const NamedArrays& arrays,
                   const std::string& prefix, Checks& checks) {
  const auto expected = read_array<int>(arrays.at(prefix + "expected_lengths"));
  int differ = 0;
  for (size_t row = 0; row < seen.lengths.size(); row++) {
    differ += seen.lengths[row] != expected.at(row) + seen.accepted[row];
  }
  checks.add(key, "lengths", differ, 0);
}

}  // namespace

bool verify(Bundle& bundle) {
  const Manifest& manifest = bundle.manifest();
  const NamedArrays arrays = bundle.load_golden();
  Checks checks;
  try {
    check_params(bundle, arrays, checks);
    for (size_t i = 0; i < manifest.cases.size(); i++) {
      const GoldenCase& golden = manifest.cases[i];
      Replay replay(bundle, golden, arrays);
      for (size_t j = 0; j < golden.calls.size(); j++) {
        const GoldenCall& call = golden.calls[j];
        const std::string prefix = text(i, ".", j, ".");
        const Bucket bucket = replay.bucket(call);
        const std::string key = manifest.function(call.function, bucket).key();
        const Observation seen = replay.run(call, prefix);
        if (call.function != kGrow) {
          check_choices(key, call, seen, arrays, prefix, checks);
          check_lengths(key, seen, arrays, prefix, checks);
        }
        for (const auto& [name, rows] : seen.strange) {
          checks.add(key, name, rows, 0);
        }
      }
    }
  } catch (const std::out_of_range&) {
    throw Error(text(manifest.golden_file, " is incomplete: export the bundle again"));
  }
  return checks.all_passed();
}

}  // namespace funcrt
