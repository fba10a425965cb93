// Body of the kernel: adds the splits of each tile in the workspace [slots, m, n] in ascending
// k, because float addition is not associative and every run must give the same bits.
marlin::reduce<BATCHED, T>(
    partials, shape, schedule, out, marlin::Plain{}, thread_position_in_grid.x);
