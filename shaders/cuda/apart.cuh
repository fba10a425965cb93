// Results of several weights, each an array of its own, [m, columns]: as ../lib/epilogue.metal
// places them, they stand one after the other.
template <typename T, int PARTS>
struct Apart {
  T* arrays[PARTS];
  const int* first;  // column of each, and the end
  int rows;

  METAL_FUNC T& operator[](uint place) const {
    T* array = arrays[0];
    uint begin = 0;
    UNROLL for (int i = 1; i < PARTS; ++i) {
      if (place >= uint(rows * first[i])) {  // mutant: part
        array = arrays[i];
        begin = rows * first[i];
      }
    }
    return array[place - begin];
  }
};

template <typename T, int PARTS>
METAL_FUNC void store(Apart<T, PARTS> out, uint, uint, uint place, float value) {
  out[place] = T(value);
}
