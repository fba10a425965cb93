// Body of the kernel: x[m, k] times the transpose of w[n, k] into out[m, n], or, where tiles
// are split, into the workspace out[slots, m, n].
typedef marlin::Staging<
    BUFFERS,
    LOADERS,
    FRAGMENTS_M,
    SIMDGROUPS_M,
    SIMDGROUPS_K,
    WIDEN,
    marlin::WeightFormat<MODE, BITS, GROUP, PACKED>>
    Stages;
threadgroup float scratch[Stages::FLOATS];
marlin::gemm_staged<Stages, WIDE, WHOLE, RAGGED, SUBTRACT>(
    marlin::make_operands(x, w, scales, biases),
    shape,
    schedule,
    out,
    marlin::Plain{},
    scratch,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
