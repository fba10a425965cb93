// Chooses experts[rows, EACH] by the largest of logits[rows, EXPERTS], and computes their scores.
// Plan: none; the template arguments describe the router. Threadgroup: one simdgroup, for a row.
marlin::route<EXPERTS, EACH, OF_ALL, LAST>(
    logits, experts, scores, threadgroup_position_in_grid.x, thread_index_in_simdgroup);
