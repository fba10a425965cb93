// The layers gate and up of a gated network as one weight: what is stored is the activation of the
// first half of the columns times the second half.

template <int ACTIVATION>
struct Gated {
  static constexpr int TOGETHER = 1;

  static METAL_FUNC int first_of_pair(int pair, int) {
    return pair;
  }

  static METAL_FUNC int distance_of_pair(int n) {
    return n / 2;
  }

  template <typename O>
  METAL_FUNC void store_pairs(O out, uint row, int pair, const Point* sums, Work work) const {
    const float gate = activate<ACTIVATION>(sums->x);
    store(out, 0, 0, row * (work.n / 2) + pair, gate * sums->y);
  }
};
