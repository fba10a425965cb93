// Transposes x [ROWS, COLUMNS]: a threadgroup takes the tiles of 32 x 32 below each other. A
// simdgroup reads a row of a tile and writes a column of it, so that both accesses of device
// memory are sequential.
// Launch: 32 x 8 threads for each 32 columns of x.
threadgroup float tile[32 * PITCH];
const uint lane = thread_position_in_threadgroup.x;
const uint first = thread_position_in_threadgroup.y;
const uint column = 32 * threadgroup_position_in_grid.x;

for (uint row = 0; row < ROWS; row += 32) {
  for (uint i = first; i < 32; i += 8) {
    if (row + i < ROWS && column + lane < COLUMNS) {
      tile[i * PITCH + lane] = x[(row + i) * COLUMNS + column + lane];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile is complete
  for (uint i = first; i < 32; i += 8) {
    if (column + i < COLUMNS && row + lane < ROWS) {
      y[(column + i) * ROWS + row + lane] = tile[lane * PITCH + i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile has been read
}
