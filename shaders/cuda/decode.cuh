// Decodes a weight to an ordinary array, like ../lib/dequantize.metal. For many rows, decoding once
// and multiplying with a dense kernel is less work.

// Returns the lane's consecutive values of row fragment f in registers of two, in ascending k.
template <typename W, typename T>
METAL_FUNC void decode_row(
    uint* registers, const uint* words, int f, GroupParams<T> params, float weight_scale) {
  T values[W::CODES];
  UNROLL for (int p = 0; p < W::PAIRS; ++p) {
    const Pair<T> pair = as_type<Pair<T>>(weights<W>(words, f, p, params));
    const int first = first_of_pair<W>(p);
    const int second = first + XValues<W>::DISTANCE;
    values[first] = W::GLOBAL ? T(float(pair.x) * weight_scale) : pair.x;
    values[second] = W::GLOBAL ? T(float(pair.y) * weight_scale) : pair.y;
  }
  memcpy(registers, values, sizeof(values));
}

// Exchanges halves of 32 bytes with the neighbouring lane: then the first four registers of both
// are consecutive, and so are the last four. Stores of whole sectors of 32 bytes take 0.6 of the
// time of stores that fill half of each (measured, docs/cuda.md). All lanes of the warp take part.
METAL_FUNC void join_sectors(uint* registers, bool is_second) {
  UNROLL for (int i = 0; i < 4; ++i) {
    const uint given = is_second ? registers[i] : registers[i + 4];
    const uint taken = __shfl_xor_sync(0xffffffffu, given, 1);
    registers[i] = is_second ? taken : registers[i];
    registers[i + 4] = is_second ? registers[i + 4] : taken;
  }
}

// One warp decodes one step of k of 32 rows of w. The output is the block of `rows` x `length`
// elements of w that begins at (row, first_k), a corner of a tile.
template <typename W, typename T, typename S>
METAL_FUNC void dequantize(
    Weights<S> source, const int* shape, T* out, uint simdgroup, int lane_index) {
  Work work;
  work.n = shape[0];
  work.k = shape[1];
  const int row = shape[2];
  const int rows = shape[3];
  const int first_k = shape[4];
  const uint length = shape[5];
  const uint steps = ceil_div(length, W::STEP);
  const int tile_row = simdgroup / steps * TILE_N;
  const uint k = simdgroup % steps * W::STEP;
  if (tile_row >= rows) {
    return;
  }
  const Lane lane = lane_of(lane_index);
  const WeightTile<S> tile = weight_tile<W>(source, row + tile_row, work, lane, 0);
  const float weight_scale = W::GLOBAL ? global_scale(source.biases) : 1.0f;
  uint words[words_of_step<W>()];
  load_words<W, false>(words, tile, first_k + k, work);
  const GroupParams<T> params =
      group_params_of<W, T>(load_numbers<W, false>(tile, first_k + k, work));
  UNROLL for (int f = 0; f < 4; ++f) {
    constexpr bool SECTORS = W::CODES == 16;
    uint registers[W::CODES / 2];
    decode_row<W>(registers, words, f, params, weight_scale);
    if (SECTORS) {
      join_sectors(registers, lane.pair % 2 != 0);
    }
    const int inside = tile_row + 8 * f + lane.row;
    const int first = SECTORS ? 32 * (lane.pair / 2) + 8 * (lane.pair % 2) : 8 * lane.pair;
    if (inside < rows) {
      T* to = out + (size_t(inside) * length + k + first);
      UNROLL for (int i = 0; i < W::CODES / 8; ++i) {
        const uint* four = registers + 4 * i;
        store_at_once(to + 16 * i, Registers{four[0], four[1], four[2], four[3]});
      }
    }
  }
}
