// Writes sum[rows, N] = x + y, and out[rows, N], its RMSNorm.
// Plan: none; EPSILON has the bits of a float. Threadgroup: THREADS threads, for one row.
threadgroup float partials[THREADS / 32];
marlin::add_norm<N, THREADS, SIDE>(
    x,
    y,
    weight,
    sum,
    out,
    partials,
    as_type<float>(EPSILON),
    threadgroup_position_in_grid.x,
    int(simdgroup_index_in_threadgroup),
    int(thread_index_in_simdgroup));
