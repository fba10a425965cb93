// Computes known products of one 8x8 product, [k, n, m], in one simdgroup for each k.
marlin::operand_probe<OPERAND>(
    out, int(threadgroup_position_in_grid.x), int(thread_index_in_simdgroup));
