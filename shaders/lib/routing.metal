// Chooses the experts of a row, and adds their results.

// Maps a float to an unsigned number in the same order; both zeros map to the same number. NaN is
// the largest number, or the smallest if its sign is set. A row with NaN therefore has NaN as
// scores, or does not choose it.
METAL_FUNC uint in_order(float value) {
  const uint bits = as_type<uint>(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

METAL_FUNC float out_of_order(uint number) {
  return as_type<float>(number >> 31 ? number & 0x7fffffffu : ~number);
}

// Writes the experts of the EACH largest of a row's EXPERTS logits, and their scores: the softmax
// over the chosen logits, or over all logits if OF_ALL. Of equal logits, the first is chosen, or
// the last if LAST. A simdgroup computes one row; a lane reads every 32nd logit and writes one
// choice.
template <int EXPERTS, int EACH, bool OF_ALL, bool LAST, typename T>
METAL_FUNC void route(
    const device T* logits, device uint* experts, device float* scores, uint row, uint lane) {
  constexpr int PER_LANE = (EXPERTS + 31) / 32;
  static_assert(EACH <= 32 && EACH <= EXPERTS, "a lane writes a choice");
  uint left[PER_LANE];
  UNROLL for (int i = 0; i < PER_LANE; ++i) {
    const uint expert = lane + 32 * i;
    left[i] = expert < EXPERTS ? in_order(float(logits[row * EXPERTS + expert])) : 0;
  }
  float most = 0;
  float all = 0;
  float own = as_type<float>(0xff800000u);  // minus infinity
  uint chosen = 0;
  for (uint choice = 0; choice < EACH; ++choice) {
    uint best = left[0];
    uint best_expert = lane;
    UNROLL for (int i = 1; i < PER_LANE; ++i) {
      best_expert = left[i] > best || (LAST && left[i] == best) ? lane + 32 * i : best_expert;
      best = max(best, left[i]);
    }
    const uint top = simd_max(best);
    const uint others = LAST ? 0 : EXPERTS - 1;
    const uint found = best == top ? min(best_expert, uint(EXPERTS - 1)) : others;
    const uint expert = LAST ? simd_max(found) : simd_min(found);
    if (choice == 0) {
      most = out_of_order(top);
      if (OF_ALL) {
        UNROLL for (int i = 0; i < PER_LANE; ++i) {
          all += lane + 32 * i < EXPERTS ? exp(out_of_order(left[i]) - most) : 0.0f;
        }
      }
    }
    UNROLL for (int i = 0; i < PER_LANE; ++i) {
      left[i] = lane + 32 * i == expert ? 0 : left[i];
    }
    own = choice == lane ? out_of_order(top) : own;
    chosen = choice == lane ? expert : chosen;
  }
  const float score = exp(own - most);  // 0 for lanes without a choice
  const float sum = simd_sum(OF_ALL ? all : score);
  if (lane < EACH) {
    experts[row * EACH + lane] = chosen;
    scores[row * EACH + lane] = score / sum;
  }
}

// Computes one of the N columns of a row: the residual plus the results of the row's EACH experts,
// times their scores. S: a pointer to floats; Metal passes few scores in `constant`.
template <int N, int EACH, typename T, typename S>
METAL_FUNC void combine(
    const device T* results, S scores, const device T* residual, device T* out, uint index) {
  const uint row = index / N;
  const uint col = index % N;
  float sum = 0;
  UNROLL for (uint choice = 0; choice < EACH; ++choice) {
    const uint pair = row * EACH + choice;
    sum += scores[pair] * float(results[pair * N + col]);
  }
  out[index] = T(float(residual[index]) + sum);
}
