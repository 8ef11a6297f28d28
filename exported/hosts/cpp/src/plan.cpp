#include "plan.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "error.hpp"
#include "mlx/device.h"

namespace funcrt {

int choose_batch(const Plan& plan, int rows) {
  const auto found = std::lower_bound(plan.batch.begin(), plan.batch.end(), rows);
  return found == plan.batch.end() ? plan.batch.back() : *found;
}

int choose_capacity(const Plan& plan, int tokens) {
  const auto found = std::upper_bound(plan.capacity.begin(), plan.capacity.end(), tokens);
  if (found == plan.capacity.end()) {
    throw Error(text("prompt has ", tokens, " tokens, largest capacity is ",
                     plan.capacity.back() - 1, ": export a larger one (--capacity ",
                     std::bit_ceil(static_cast<uint32_t>(tokens) + 1), ")"));
  }
  return *found;
}

int choose_chunk(const Plan& plan, int pending, int overhead) {
  std::vector<int64_t> cost(static_cast<size_t>(pending) + 1);
  int first = plan.tokens.back();
  for (int n = 1; n <= pending; n++) {
    cost[n] = INT64_MAX;
    for (const int chunk : plan.tokens) {
      const int64_t total = chunk + overhead + cost[std::max(n - chunk, 0)];
      if (total <= cost[n]) {  // of equally cheap ones the largest
        cost[n] = total;
        first = chunk;
      }
    }
  }
  return first;
}

int choose_overhead() { return mlx::core::default_device() == mlx::core::Device::cpu ? 10 : 512; }

}  // namespace funcrt
