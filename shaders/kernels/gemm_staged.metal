// Body of the kernel: x[m, k] times the transpose of w[n, k] into out[m, n], or, where tiles
// are split, into the workspace out[slots, m, n].
typedef Staging<
    BUFFERS,
    LOADERS,
    FRAGMENTS_M,
    SIMDGROUPS_M,
    SIMDGROUPS_K,
    WIDEN,
    WeightFormat<MODE, BITS, GROUP, PACKED>>
    Stages;
threadgroup float scratch[Stages::FLOATS];
gemm_staged<Stages, WIDE, WHOLE, RAGGED, SUBTRACT>(
    make_operands(x, w, scales, biases),
    shape,
    schedule,
    out,
    Plain{},
    scratch,
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
