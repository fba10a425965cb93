// Sum of two rows, and the RMSNorm of the sum.

// Writes sum[N] = x + y and out[N] = weight * sum / rms(sum). The norm is that of the rounded sum,
// as in separate operations. A threadgroup of THREADS threads computes one
// row; a thread takes SIDE values side by side.
template <int N, int THREADS, int SIDE, typename T>
METAL_FUNC void add_norm(
    const device T* x,
    const device T* y,
    const device T* weight,
    device T* sum,
    device T* out,
    threadgroup float* partials,
    float epsilon,
    uint row,
    int simdgroup,
    int lane) {
  constexpr int TURNS = (N + SIDE * THREADS - 1) / (SIDE * THREADS);
  const uint first = SIDE * (32 * simdgroup + lane);
  float values[TURNS][SIDE];
  float squares = 0;
  UNROLL for (int turn = 0; turn < TURNS; ++turn) {
    UNROLL for (int i = 0; i < SIDE; ++i) {
      const uint col = first + turn * SIDE * THREADS + i;
      const uint index = row * N + col;
      const T total = col < N ? T(float(x[index]) + float(y[index])) : T(0);
      values[turn][i] = float(total);
      squares += values[turn][i] * values[turn][i];
      if (col < N) {
        sum[index] = total;
      }
    }
  }
  squares = simd_sum(squares);
  if (lane == 0) {
    partials[simdgroup] = squares;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float all = simd_sum(lane < THREADS / 32 ? partials[lane] : 0.0f);
  const float factor = rsqrt(all / N + epsilon);
  UNROLL for (int turn = 0; turn < TURNS; ++turn) {
    UNROLL for (int i = 0; i < SIDE; ++i) {
      const uint col = first + turn * SIDE * THREADS + i;
      if (col < N) {
        out[row * N + col] = T(values[turn][i] * factor * float(weight[col]));
      }
    }
  }
}
