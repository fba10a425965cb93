// The output of several weights as separate arrays [m, columns]. They are indexed like one array in
// which they follow each other, as in ../lib/epilogue.metal.
template <typename T, int PARTS>
struct SplitOutput {
  T* arrays[PARTS];
  const int* first;  // first column of each array, and the end
  int rows;

  METAL_FUNC T& operator[](uint index) const {
    T* array = arrays[0];
    uint begin = 0;
    UNROLL for (int i = 1; i < PARTS; ++i) {
      if (index >= uint(rows * first[i])) {
        array = arrays[i];
        begin = rows * first[i];
      }
    }
    return array[index - begin];
  }
};

template <typename T, int PARTS>
METAL_FUNC void store(SplitOutput<T, PARTS> out, uint, uint, uint index, float value) {
  out[index] = T(value);
}
