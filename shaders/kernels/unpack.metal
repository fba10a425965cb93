// Body of the kernel: codes from tiles w[., n tiles, k tiles, .] to MLX's rows out[., n, words].
typedef marlin::Codes<BITS, TILES, LOW, LOW_ROW, LOW_K, HIGH_ROW, HIGH_K> C;
threadgroup uint scratch[C::TILES * C::TILE];
marlin::unpack<C>(
    w,
    shape,
    out,
    scratch,
    threadgroup_position_in_grid,
    thread_index_in_threadgroup,
    threads_per_threadgroup.x);
