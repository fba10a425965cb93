// Chooses experts[rows, EACH] by the largest of logits[rows, EXPERTS], and computes their scores.
// Plan: none; the template arguments describe the router. Block: one warp, for one row.
marlin::route<EXPERTS, EACH, OF_ALL, LAST>(logits, experts, scores, blockIdx.x, threadIdx.x);
