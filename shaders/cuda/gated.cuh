// The layers gate and up of a gated network as one weight: what is stored is the activation of the
// first half of the columns times the second half.

template <int ACTIVATION>
struct Gated {
  static METAL_FUNC int first_of_pair(int pair, int) {
    return pair;
  }

  static METAL_FUNC int distance_of_pair(int n) {
    return n / 2;
  }

  template <typename O>
  METAL_FUNC void store_pair(O out, uint row, int pair, float gate, float up, Work work) const {
    store(out, 0, 0, row * (work.n / 2) + pair, activate<ACTIVATION>(gate) * up);
  }
};
