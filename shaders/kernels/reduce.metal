// Body of the kernel: adds the slices of the workspace [k_parallel, m, n] in ascending order,
// because float addition is not associative and every run must give the same bits.
const int index = int(thread_position_in_grid.x);
const int size = params[0] * params[1];
float total = partials[index];
for (int split = 1; split < params[3]; ++split) {
  total += partials[split * size + index];
}
out[index] = T(total);
