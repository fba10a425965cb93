// Access to the rows of x: in device memory, or normalized by every block into its shared memory.
// For few rows, the latter takes no longer than waiting for the end of a separate kernel, and the
// host launches one kernel less.

template <typename T>
struct Rows {
  typedef T Type;
  const T* x;
};

// Rows with RMSNorm. EPSILON has the bits of the float epsilon. Values are rounded before they are
// multiplied by the weight, as in MLX's own kernel.
template <int EPSILON, typename T>
struct NormedRows {
  typedef T Type;
  const T* x;
  const T* weight;
};

template <typename T>
METAL_FUNC Rows<T> plain_rows(const T* x) {
  return {x};
}

template <int EPSILON, typename T>
METAL_FUNC NormedRows<EPSILON, T> normed(const T* x, const T* weight) {
  return {x, weight};
}

// Values of x in shared memory.
template <typename T>
struct InShared {
  const T* at;

  METAL_FUNC InShared operator+(int distance) const {
    return {at + distance};
  }
};

// Rows in shared memory, each with a padding of 16 bytes against bank conflicts: eight rows are
// read at once, and in steps of 64 from different banks.
template <typename T>
struct SharedRows {
  typedef T Type;
  static constexpr int PADDING = 16 / sizeof(T);
  const T* x;
};

template <typename T>
METAL_FUNC const T* row_of(Rows<T> rows, size_t row, Work work) {
  return rows.x + row * work.k;
}

template <typename T>
METAL_FUNC InShared<T> row_of(SharedRows<T> rows, size_t row, Work work) {
  return {rows.x + row * (work.k + SharedRows<T>::PADDING)};
}

template <int REGISTERS, bool ALIGNED, typename T>
METAL_FUNC void load_activations(uint* x_values, InShared<T> from) {
  UNROLL for (int i = 0; i < REGISTERS; i += 4) {
    const Registers v = *(const Registers*)(from.at + 2 * i);
    x_values[i] = v.x;
    x_values[i + 1] = v.y;
    x_values[i + 2] = v.z;
    x_values[i + 3] = v.w;
  }
}

// Prepares rows for the main loop. All threads of the block take part.
//
//   scratch  floats that are not used until the first sums
//   storage  memory for normalized rows
template <typename T>
METAL_FUNC Rows<T> prepare_rows(Rows<T> rows, float*, T*, Work) {
  return rows;
}

// Eight values, two per register.
struct Chunk {
  static constexpr int SIZE = 8;
  uint pairs[4];

  template <typename T>
  METAL_FUNC float value(int i, T) const {
    return float(as_type<T>(ushort(pairs[i / 2] >> 16 * (i % 2))));
  }
};

METAL_FUNC void store_chunk(void* to, Chunk chunk) {
  *(Registers*)to = {chunk.pairs[0], chunk.pairs[1], chunk.pairs[2], chunk.pairs[3]};
}

// A thread's chunks of the rows. The warps of a block are distributed evenly over the rows, so that
// all rows are read at the same time.
struct Share {
  int first;
  int step;
  int row;
  int rows;     // stride between the rows of this thread
  int member;   // index of this warp among those of its row
  int members;  // number of warps of its row
};

METAL_FUNC Share share_of_thread(int rows) {
  constexpr int WARPS = THREADS / 32;
  const int warp = threadIdx.x / 32;
  const int each = min(rows, WARPS);
  const int row = warp % each;
  const int member = warp / each;
  const int members = (WARPS - row + each - 1) / each;
  const int first = Chunk::SIZE * (32 * member + threadIdx.x % 32);
  return {first, Chunk::SIZE * 32 * members, row, each, member, members};
}

// Copies chunks of a row and returns the sum of their squares.
template <bool ALIGNED, typename T>
METAL_FUNC float copy_row(T* to, const T* from, int k, int first, int step) {
  float squares = 0.0f;
  for (int i = first; i < k; i += step) {
    Chunk chunk;
    load_activations<4, ALIGNED>(chunk.pairs, from + i);
    store_chunk(to + i, chunk);
    UNROLL for (int j = 0; j < Chunk::SIZE; ++j) {
      const float value = chunk.value(j, T());
      squares = fmaf(value, value, squares);
    }
  }
  return squares;
}

// Multiplies chunks of a row by a factor and by a norm's weight.
template <typename T>
METAL_FUNC void scale_row(T* row, const T* weight, float factor, int k, Share share) {
  for (int i = share.first; i < k; i += share.step) {
    Chunk values;
    Chunk weights;
    load_activations<4, true>(values.pairs, InShared<T>{row + i});
    load_activations<4, true>(weights.pairs, InShared<T>{weight + i});
    Chunk scaled = {{0, 0, 0, 0}};
    UNROLL for (int j = 0; j < Chunk::SIZE; ++j) {
      const T value = T(values.value(j, T()) * factor);
      const ushort bits = as_type<ushort>(T(float(value) * weights.value(j, T())));
      scaled.pairs[j / 2] |= uint(bits) << 16 * (j % 2);
    }
    store_chunk(row + i, scaled);
  }
}

// Copies the weight and the rows, so that all loads from device memory are issued together. Of a
// row, a thread later needs only its own chunks and the sums of squares of the row's other warps.
template <bool ALIGNED, typename T>
METAL_FUNC void copy_rows(
    float* scratch, T* storage, const T* x, const T* weight, Work work, Share share) {
  copy_row<ALIGNED>(
      storage, weight, work.k, Chunk::SIZE * threadIdx.x, Chunk::SIZE * THREADS);
  for (int row = share.row; row < work.m; row += share.rows) {
    T* own = storage + (row + 1) * (work.k + SharedRows<T>::PADDING);
    const T* from = x + size_t(row) * work.k;
    const float squares =
        sum_of_warp(copy_row<ALIGNED>(own, from, work.k, share.first, share.step));
    if (threadIdx.x % 32 == 0) {
      scratch[row * (THREADS / 32) + share.member] = squares;
    }
  }
}

template <int EPSILON, typename T>
METAL_FUNC SharedRows<T> prepare_rows(NormedRows<EPSILON, T> rows, float* scratch, T* storage, Work work) {
  const Share share = share_of_thread(work.m);
  if (is_aligned(rows.x) && is_aligned(rows.weight)) {
    copy_rows<true>(scratch, storage, rows.x, rows.weight, work, share);
  } else {
    copy_rows<false>(scratch, storage, rows.x, rows.weight, work, share);
  }
  __syncthreads();
  for (int row = share.row; row < work.m; row += share.rows) {
    float squares = 0.0f;
    for (int i = 0; i < share.members; ++i) {
      squares += scratch[row * (THREADS / 32) + i];
    }
    const float factor = rsqrtf(squares / work.k + as_type<float>(EPSILON));
    T* own = storage + (row + 1) * (work.k + SharedRows<T>::PADDING);
    scale_row(own, storage, factor, work.k, share);
  }
  __syncthreads();
  return {storage + work.k + SharedRows<T>::PADDING};
}
