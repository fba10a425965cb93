// Writes q[streams, HEADS, TOKENS, FEATURES] and k[streams, KV_HEADS, TOKENS, FEATURES], normalized
// if NORM and rotated, of qkv[streams, TOKENS, COLUMNS].
// Plan: none; the template arguments describe the heads, EPSILON and FACTOR with the bits of
// floats. Threadgroup: one simdgroup, for one head of one token.
marlin::rotate_heads<HEADS, KV_HEADS, FEATURES, COLUMNS, TOKENS, PER_STREAM, NORM>(
    qkv,
    positions,
    freqs,
    q_norm,
    k_norm,
    q,
    k,
    as_type<float>(EPSILON),
    as_type<float>(FACTOR),
    threadgroup_position_in_grid.x,
    thread_index_in_simdgroup);
