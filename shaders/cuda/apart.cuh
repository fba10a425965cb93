// Results of several weights, each an array of its own, [m, columns]: as ../lib/epilogue.metal
// places them, they stand one after the other.
template <typename T, int PARTS>
struct Apart {
  T* arrays[PARTS];
  const int* first;  // column of each, and the end
  int rows;

  METAL_FUNC T& operator[](uint index) const {
    T* array = arrays[0];
    uint begin = 0;
    UNROLL for (int i = 1; i < PARTS; ++i) {
      if (index >= uint(rows * first[i])) {  // mutant: part
        array = arrays[i];
        begin = rows * first[i];
      }
    }
    return array[index - begin];
  }
};

template <typename T, int PARTS>
METAL_FUNC void store(Apart<T, PARTS> out, uint, uint, uint index, float value) {
  out[index] = T(value);
}
