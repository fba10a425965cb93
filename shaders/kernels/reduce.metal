// Body of the kernel: adds the splits of each tile in the workspace [slots, m, n] in ascending
// k, because float addition is not associative and every run must give the same bits.
const uint place = thread_position_in_grid.x;
const Work work = read_work(shape, schedule);
out[place] = T(sum_of_splits(partials, place, work));
