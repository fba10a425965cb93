// Writes which elements the lanes of a simdgroup have of the operands of a tensor operation, as
// its queries state it: [lane][w, x, result][capacity, then whether valid and indices of each].
marlin::tensor_layout<T>(out, int(thread_index_in_simdgroup));
