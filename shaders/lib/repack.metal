// Moves codes between MLX's rows of bits and packed tiles, word by word, through threadgroup
// memory. Device memory is read and written once, in whole rows of consecutive words.
//
// Template arguments define the slot of a code in its plane of a tile; they are made from the
// table of `layout.py`. The slot is the code's number, 64 * row + k, with its bits permuted:
// hexadecimal digit i of ROW is the new position of bit i of the row, and digit i of K that of
// bit i of k.

// A plane: BITS consecutive bits of every code, beginning at bit FIRST.
template <int BITS_, int FIRST_, int ROW_, int K_>
struct Plane {
  STATIC int BITS = BITS_;
  STATIC int FIRST = FIRST_;
  STATIC int ROW = ROW_;
  STATIC int K = K_;
  STATIC int IN_WORD = 32 / BITS_;
  STATIC uint MASK = (1u << BITS_) - 1;
};

template <int BITS_, int TILES_, int LOW_, int LOW_ROW, int LOW_K, int HIGH_ROW, int HIGH_K>
struct Codes {
  STATIC int BITS = BITS_;
  STATIC bool TWO_PLANES = BITS_ > LOW_;
  typedef Plane<LOW_, 0, LOW_ROW, LOW_K> Low;
  // It has at least one bit, so that this compiles if there is no second plane.
  typedef Plane<(BITS_ > LOW_ ? BITS_ - LOW_ : 1), LOW_, HIGH_ROW, HIGH_K> High;
  // Words of a tile, of its low plane, and of a row of the tile in MLX's layout.
  STATIC int TILE = TILE_N * TILE_K / 32 * BITS_;
  STATIC int LOW_TILE = TILE_N * TILE_K / 32 * LOW_;
  STATIC int ROW = TILE_K / 32 * BITS_;
  // Tiles along k that a threadgroup moves, and words of a row of all of them.
  STATIC int TILES = TILES_;
  STATIC int ROWS = TILES * ROW;
  // Odd, so that adjacent rows begin in different banks.
  STATIC int STRIDE = ROWS + 1;
};

// Moves bit i of the value to the position that digit i of BIT_OFFSETS gives; `gathered` is the
// inverse.
template <int BIT_OFFSETS, int COUNT>
METAL_FUNC uint scattered(uint value) {
  uint slot = 0;
  UNROLL for (int i = 0; i < COUNT; ++i) {
    slot |= (value >> i & 1) << (BIT_OFFSETS >> 4 * i & 15);
  }
  return slot;
}

template <int BIT_OFFSETS, int COUNT>
METAL_FUNC uint gathered(uint slot) {
  uint value = 0;
  UNROLL for (int i = 0; i < COUNT; ++i) {
    value |= (slot >> (BIT_OFFSETS >> 4 * i & 15) & 1) << i;
  }
  return value;
}

// The tiles that a threadgroup moves, all from one row of tiles.
struct Block {
  ulong native;  // first word in MLX's layout, counted over all weights
  ulong packed;  // first word in the packed layout, counted in the same way
  uint rows;     // rows that exist; the remaining rows of the tiles are padding
  uint words;    // words of a row
  uint tiles;
  uint pitch;  // words from a row to the next one in MLX's layout
};

template <typename C>
METAL_FUNC Block block_of_threadgroup(const constant int32_t* shape, uint3 position) {
  const uint n = shape[0];
  const uint k = shape[1];
  const uint n_tiles = ceil_div(n, TILE_N);
  const uint k_tiles = ceil_div(k, TILE_K);
  const uint first_tile = position.x * C::TILES;
  const uint first_row = position.y * TILE_N;
  Block block;
  block.pitch = k / 32 * C::BITS;
  block.native = (ulong(position.z) * n + first_row) * block.pitch + first_tile * C::ROW;
  block.packed = ((ulong(position.z) * n_tiles + position.y) * k_tiles + first_tile) * C::TILE;
  block.rows = min(n - first_row, uint(TILE_N));
  block.words = min(block.pitch - first_tile * C::ROW, uint(C::ROWS));
  block.tiles = min(k_tiles - first_tile, uint(C::TILES));
  return block;
}

// Returns a word of a plane, made of codes from the tile's rows.
template <typename C, typename P>
METAL_FUNC uint packed_word(const threadgroup uint* rows, uint index) {
  const uint slot = index * P::IN_WORD;
  uint word = 0;
  UNROLL for (int i = 0; i < P::IN_WORD; ++i) {
    const uint row = gathered<P::ROW, 5>(slot | i);
    const uint bit = gathered<P::K, 6>(slot | i) * C::BITS + P::FIRST;
    const threadgroup uint* source = rows + row * C::STRIDE + bit / 32;
    uint code = source[0] >> bit % 32;
    if (bit % 32 + P::BITS > 32) {
      code |= source[1] << (32 - bit % 32);
    }
    word |= (code & P::MASK) << P::BITS * i;
  }
  return word;
}

// Returns the bits of a code that a plane holds, at their position in the code.
template <typename P>
METAL_FUNC uint part_of_code(const threadgroup uint* plane, uint row, uint k) {
  const uint slot = scattered<P::ROW, 5>(row) | scattered<P::K, 6>(k);
  return (plane[slot / P::IN_WORD] >> slot % P::IN_WORD * P::BITS & P::MASK) << P::FIRST;
}

// Returns a word of a row of a tile. Its first code may begin in the word before it.
template <typename C>
METAL_FUNC uint native_word(const threadgroup uint* tile, uint row, uint index) {
  constexpr int MOST_CODES = 32 % C::BITS == 0 ? 32 / C::BITS : (30 + 2 * C::BITS) / C::BITS;
  const uint first = index * 32 / C::BITS;
  uint word = 0;
  UNROLL for (int i = 0; i < MOST_CODES; ++i) {
    const uint k = first + i;
    const int bit = int(k) * C::BITS - int(index) * 32;
    if (bit < 32) {
      uint code = part_of_code<typename C::Low>(tile, row, k);
      if (C::TWO_PLANES) {
        code |= part_of_code<typename C::High>(tile + C::LOW_TILE, row, k);
      }
      word |= bit < 0 ? code >> -bit : code << bit;
    }
  }
  return word;
}

template <typename C>
METAL_FUNC void pack(
    const device uint32_t* w,
    const constant int32_t* shape,
    device uint32_t* out,
    threadgroup uint* scratch,
    uint3 position,
    uint thread_index,
    uint threads) {
  const Block block = block_of_threadgroup<C>(shape, position);
  for (uint i = thread_index; i < TILE_N * C::ROWS; i += threads) {
    const uint row = i / C::ROWS;
    const uint word = i % C::ROWS;
    const bool is_there = row < block.rows && word < block.words;
    scratch[row * C::STRIDE + word] =
        is_there ? w[block.native + ulong(row) * block.pitch + word] : 0;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < block.tiles * C::TILE; i += threads) {
    const threadgroup uint* rows = scratch + i / C::TILE * C::ROW;
    const uint word = i % C::TILE;
    out[block.packed + i] = word < C::LOW_TILE
                              ? packed_word<C, typename C::Low>(rows, word)
                              : packed_word<C, typename C::High>(rows, word - C::LOW_TILE);
  }
}

template <typename C>
METAL_FUNC void unpack(
    const device uint32_t* w,
    const constant int32_t* shape,
    device uint32_t* out,
    threadgroup uint* scratch,
    uint3 position,
    uint thread_index,
    uint threads) {
  const Block block = block_of_threadgroup<C>(shape, position);
  for (uint i = thread_index; i < block.tiles * C::TILE; i += threads) {
    scratch[i] = w[block.packed + i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < TILE_N * C::ROWS; i += threads) {
    const uint row = i / C::ROWS;
    const uint word = i % C::ROWS;
    if (row < block.rows && word < block.words) {
      out[block.native + ulong(row) * block.pitch + word] =
          native_word<C>(scratch + word / C::ROW * C::TILE, row, word % C::ROW);
    }
  }
}
