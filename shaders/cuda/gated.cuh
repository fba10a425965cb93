// Epilogue of a gated network whose layers gate and up are one weight: stores the activation of the
// first half of the columns times the second half.

// Added to both sums first: nothing, or the biases [columns] of gate and of up.
struct NoBiases {
  METAL_FUNC Point added(Point sums, int) const {
    return sums;
  }
};

template <typename T>
struct Biases {
  const T* gate;
  const T* up;

  METAL_FUNC Point added(Point sums, int pair) const {
    return {sums.x + float(gate[pair]), sums.y + float(up[pair])};
  }
};

template <int ACTIVATION, typename B = NoBiases>
struct Gated {
  static constexpr int TOGETHER = 1;
  B biases;

  static METAL_FUNC int first_of_pair(int pair, int) {
    return pair;
  }

  static METAL_FUNC int distance_of_pair(int n) {
    return n / 2;
  }

  template <typename O>
  METAL_FUNC void store_pairs(O out, uint row, int pair, const Point* sums, Work work) const {
    const Point both = biases.added(*sums, pair);
    const float value = gated<ACTIVATION>(both.x, both.y);
    store(out, 0, 0, row * (work.n / 2) + pair, value);
  }
};
