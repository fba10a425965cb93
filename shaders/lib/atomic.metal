// Adds to a sum that all splits of a tile share. Such sums have no slots.

METAL_FUNC void store(device atomic<float>* out, uint, uint, uint index, float value) {
  atomic_fetch_add_explicit(out + index, value, memory_order_relaxed);
}
