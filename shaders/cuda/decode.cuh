// Decodes a weight to an ordinary array, like ../lib/dequantize.metal. For many rows, decoding once
// and multiplying with a dense kernel is less work.

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
    const int inside = tile_row + 8 * f + lane.row;
    if (inside < rows) {
      T* first = out + size_t(inside) * length + k + W::CODES * lane.pair;
      UNROLL for (int p = 0; p < W::PAIRS; ++p) {
        const Pair<T> pair = as_type<Pair<T>>(weights<W>(words, f, p, params));
        first[first_of_pair<W>(p)] = W::GLOBAL ? T(float(pair.x) * weight_scale) : pair.x;
        first[first_of_pair<W>(p) + XValues<W>::DISTANCE] =
            W::GLOBAL ? T(float(pair.y) * weight_scale) : pair.y;
      }
    }
  }
}
