// Fragments of 8x8 matrix products: operands from codes and activations, and their products.
// Template arguments are those of gemm_register.

template <typename F>
METAL_FUNC simdgroup_matrix<F, 8, 8> make_fragment(F first, F second) {
  simdgroup_matrix<F, 8, 8> result;
  result.thread_elements()[0] = first;
  result.thread_elements()[1] = second;
  return result;
}

// Loads the operands of one step: words, activations, scales and biases. x_vec4[column * VEC4S
// + h] has four consecutive activations of one of the lane's columns, whose first activation is
// at starts[column] + k.
template <int COLUMNS, typename W, typename F, typename T, typename S>
METAL_FUNC GroupParams load_step(
    thread uint* words,
    thread vec<F, 4>* x_vec4,
    WeightTile<S> tile,
    const device T* x,
    thread const uint* starts,
    uint k,
    int lane_index) {
  constexpr int VEC4S = W::VEC4S;
  load_words<W>(words, tile, k, lane_index);
  UNROLL for (int i = 0; i < COLUMNS * VEC4S; ++i) {
    x_vec4[i] = load_operand(F(), x + vec4_offset<W>(0, i % VEC4S), starts[i / VEC4S] + k);
  }
  return load_group_params<W>(tile, k);
}

// Sums x over the step's k, for the lane's two columns of each fragment.
template <int FRAGMENTS_M, int VEC4S, typename Vec4>
METAL_FUNC void sum_activations(thread float2* sums, thread const Vec4* x_vec4) {
  UNROLL for (int column = 0; column < 2 * FRAGMENTS_M; ++column) {
    sums[column / 2][column % 2] = sum_over_rows(sum_of_x<VEC4S>(x_vec4 + column * VEC4S));
  }
}

// Makes fragments of the activations. Those of number s of vector h are columns[(4 * h + s) *
// FRAGMENTS_M + j].
template <int FRAGMENTS_M, int VEC4S, typename F>
METAL_FUNC void
make_columns(thread simdgroup_matrix<F, 8, 8>* columns, thread const vec<F, 4>* x_vec4) {
  UNROLL for (int i = 0; i < 4 * VEC4S * FRAGMENTS_M; ++i) {
    const int h = i / FRAGMENTS_M / 4;
    const int s = i / FRAGMENTS_M % 4;
    const int j = i % FRAGMENTS_M;
    columns[i] = make_fragment<F>(x_vec4[2 * j * VEC4S + h][s], x_vec4[(2 * j + 1) * VEC4S + h][s]);
  }
}

// Returns the operand of multiply `step` for row fragment f: codes from a lane's words, or
// weights of a group of 16.
template <typename W, typename V>
METAL_FUNC simdgroup_matrix<V, 8, 8>
row_fragment(thread const uint* words, int f, int step, float scale, float bias) {
  vec<V, 2> values = decode<W, V, W::HAS_OFFSET>(words, f, step);
  if (W::FRAGMENT >= HALF_WEIGHTS) {
    const float2 weights = W::BIASED ? fma(float2(values), float2(scale), float2(bias))
                                     : float2(values) * scale;
    values = vec<V, 2>(weights);
  }
  return make_fragment<V>(values.x, values.y);
}

// Computes products[j] = codes of row fragment f times activations of fragment j.
template <int FRAGMENTS_M, typename W, typename V, typename F, typename Codes>
METAL_FUNC void multiply(
    thread simdgroup_matrix<float, 8, 8>* products,
    Codes codes,
    int f,
    thread simdgroup_matrix<F, 8, 8>* columns,
    thread const float2* sums,
    float scale,
    float bias) {
  UNROLL for (int j = 0; j < FRAGMENTS_M; ++j) {
    // Each code exceeds its value by ZERO, so the sum starts at -ZERO * sum(x).
    const float2 start = W::HAS_OFFSET ? -float(W::ZERO) * sums[j] : float2(0.0f);
    products[j] = make_fragment<float>(start.x, start.y);
  }
  UNROLL for (int step = 0; step < W::PAIRS; ++step) {
    simdgroup_matrix<V, 8, 8> rows = row_fragment<W, V>(codes, f, step, scale, bias);
    UNROLL for (int j = 0; j < FRAGMENTS_M; ++j) {
      simdgroup_multiply_accumulate(
          products[j], rows, columns[step * FRAGMENTS_M + j], products[j]);
    }
  }
}

template <int FRAGMENTS_M>
METAL_FUNC void add_scaled(
    thread float2* totals, thread simdgroup_matrix<float, 8, 8>* products, float scale) {
  UNROLL for (int j = 0; j < FRAGMENTS_M; ++j) {
    const float2 product =
        float2(products[j].thread_elements()[0], products[j].thread_elements()[1]);
    totals[j] = fma(float2(scale), product, totals[j]);
  }
}

// corner: index in scratch of the lane's first element of its simdgroup's tile.
template <int FRAGMENTS_M>
METAL_FUNC void
write_scratch(threadgroup float* scratch, thread const float2* totals, int corner) {
  UNROLL for (int i = 0; i < 4 * FRAGMENTS_M; ++i) {
    const int place = corner + 8 * (i % FRAGMENTS_M) * SCRATCH_ROW + 8 * (i / FRAGMENTS_M);
    scratch[place] = totals[i].x;
    scratch[place + SCRATCH_ROW] = totals[i].y;
  }
}

// Adds the products of one step to the totals of four row fragments.
template <
    int FRAGMENTS,
    typename W,
    typename V,
    typename F,
    typename Codes>
METAL_FUNC void add_products(
    thread float2* totals,
    Codes codes,
    thread simdgroup_matrix<F, 8, 8>* columns,
    thread const float2* sums,
    GroupParams params,
    float weight_scale,
    int cols) {
  if (W::FRAGMENT < HALF_WEIGHTS && W::BIASED) {
    UNROLL for (int i = 0; i < 4 * FRAGMENTS; ++i) {
      totals[i] = fma(float2(params.bias[i / FRAGMENTS]), sums[i % FRAGMENTS], totals[i]);
    }
  }
  // One row fragment at a time: this keeps few products in registers.
  UNROLL for (int f = 0; f < 4; ++f) {
    if (W::RAGGED && 8 * f >= cols) {
      break;
    }
    simdgroup_matrix<float, 8, 8> products[FRAGMENTS];
    const float scale = params.scale[f];
    multiply<FRAGMENTS, W, V>(
        products, codes, f, columns, sums, scale, params.bias[f]);
    add_scaled<FRAGMENTS>(
        totals + f * FRAGMENTS,
        products,
        W::FRAGMENT >= HALF_WEIGHTS ? weight_scale : scale);
  }
}
