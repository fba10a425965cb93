// Body of the kernel: the experts[rows, EACH] that rows of logits[rows, EXPERTS] choose, and their
// scores.
marlin::route<EXPERTS, EACH, OF_ALL, LAST>(logits, experts, scores, blockIdx.x, threadIdx.x);
