// Computes known products of one tensor operation, [k, n, m], in one simdgroup for each k.
// Accumulating, they are added to 10000 + 16 n + m.
marlin::tensor_probe<ADD, T>(
    out, int(threadgroup_position_in_grid.x), int(thread_index_in_simdgroup));
