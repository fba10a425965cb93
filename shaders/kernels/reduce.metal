// Adds the splits of each tile in the workspace [slots, m, n] in ascending k. The order is
// fixed because float addition is not associative and every run must give the same bits.
// Plan: work. Threadgroup: any number of threads; a thread has up to ROWS rows of a column.
marlin::reduce<ROWS, BATCHED, T>(
    partials, shape, schedule, out, marlin::Plain{}, thread_position_in_grid.x);
