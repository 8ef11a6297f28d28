#pragma once

#include "manifest.hpp"

namespace funcrt {

/// The smallest declared batch for `rows`, or the largest one: more rows go in several groups.
int choose_batch(const Plan& plan, int rows);

/// The smallest declared S that holds `tokens` beside the scratch slot. Raises Error.
int choose_capacity(const Plan& plan, int tokens);

/// The declared T with which to begin feeding `pending` tokens in the cheapest calls, the same as
/// `funcrt.buckets.BucketPlan.choose_chunk`: a call of T tokens costs T + `overhead`.
int choose_chunk(const Plan& plan, int pending, int overhead);

/// What a call costs beside its tokens, in tokens, as `funcrt.buckets.choose_overhead` says.
int choose_overhead();

}  // namespace funcrt
