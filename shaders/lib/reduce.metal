// The sum of one output element's splits, in ascending k.
METAL_FUNC float sum_of_splits(const device float* partials, uint place, Work work) {
  const uint size = work.m * work.n;
  const uint splits = splits_of_element(place / work.n, place % work.n, work);
  float total = partials[place];
  for (uint split = 1; split < splits; ++split) {
    total += partials[split * size + place];
  }
  return total;
}
