// Unpacks codes from tiles w[., n tiles, k tiles, .] into MLX's rows out[., n, words].
// Plan: none; the template arguments describe the order of the codes. Threadgroup: any number
// of threads; it moves TILES tiles of one row of tiles of one weight.
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
