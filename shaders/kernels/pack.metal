// Packs codes from MLX's rows w[., n, words] into tiles out[., n tiles, k tiles, .].
// Plan: none; the template arguments describe the order of the codes. Threadgroup: any number
// of threads; it moves TILES tiles of one row of tiles of one weight.
typedef marlin::Codes<BITS, TILES, LOW, LOW_ROW, LOW_K, HIGH_ROW, HIGH_K> C;
threadgroup uint scratch[marlin::TILE_N * C::STRIDE];
marlin::pack<C>(
    w,
    shape,
    out,
    scratch,
    threadgroup_position_in_grid,
    thread_index_in_threadgroup,
    threads_per_threadgroup.x);
