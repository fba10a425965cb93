// Decodes a weight to an ordinary array. For many rows, decoding once and multiplying with a
// dense kernel is less work.

// Decodes the lane's consecutive values of row fragment f, in ascending k.
template <typename W>
METAL_FUNC void decode_row(
    thread float* values, thread const uint* words, int f, GroupParams params, float weight_scale) {
  UNROLL for (int t = 0; t < W::PAIRS; ++t) {
    const float2 codes = decode<W, float, false>(words, f, t);
    const int first = vec4_offset<W>(0, t / 4) + t % 4;
    const int second = vec4_offset<W>(1, t / 4) + t % 4;
    values[first] = fma(params.scale[f], codes.x, params.bias[f]) * weight_scale;
    values[second] = fma(params.scale[f], codes.y, params.bias[f]) * weight_scale;
  }
}

// Stores four values at once; a lane's first index is a multiple of eight elements.
METAL_FUNC void store_four(device half* out, thread const float* values) {
  *(device packed_half4*)out = half4(float4(values[0], values[1], values[2], values[3]));
}

METAL_FUNC void store_four(device float* out, thread const float* values) {
  *(device packed_float4*)out = float4(values[0], values[1], values[2], values[3]);
}

METAL_FUNC void store_four(device bfloat* out, thread const float* values) {
  UNROLL for (int i = 0; i < 4; ++i) {
    out[i] = bfloat(values[i]);
  }
}

// One simdgroup decodes one step of k of 32 rows of w. The output is the block of `rows` x
// `length` elements of w that begins at (row, first_k), a corner of a tile.
template <typename W, typename S, typename O>
METAL_FUNC void dequantize(
    Weights<S> weights,
    const constant int32_t* shape,
    device O* out,
    uint simdgroup,
    int lane_index) {
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
  const WeightTile<S> tile =
      weight_tile<W>(weights, row + tile_row, work, lane_index);
  uint words[words_of_step<W>()];
  load_words<W>(words, tile, first_k + k, lane_index);
  const GroupParams params = load_group_params<W>(tile, first_k + k);
  UNROLL for (int f = 0; f < 4; ++f) {
    const int inside = tile_row + 8 * f + lane.row;
    float values[W::CODES];
    decode_row<W>(values, words, f, params, tile.weight_scale);
    if (inside < rows) {
      device O* first = out + (uint(inside) * length + k + W::CODES * lane.pair);
      UNROLL for (int i = 0; i < W::CODES; i += 4) {
        store_four(first + i, values + i);
      }
    }
  }
}
