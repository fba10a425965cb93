// The best kernel of the study in docs/cuda.md, and its times: x[m, k] times the transpose of an
// affine 4-bit weight in the packed layout, float16, up to 8 rows. Not part of the package.
//
// nvcc -O3 -std=c++17 -arch=sm_90 -o cuda_study benchmarks/cuda_study.cu && ./cuda_study

#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                      \
  do {                                                                   \
    const cudaError_t error = (call);                                    \
    if (error != cudaSuccess) {                                          \
      std::printf("line %d: %s\n", __LINE__, cudaGetErrorString(error)); \
      std::exit(1);                                                      \
    }                                                                    \
  } while (0)

constexpr int TILE_N = 32;
constexpr int TILE_K = 64;
constexpr int SCRATCH_ROW = TILE_N + 4;
constexpr int LAUNCHES = 30;

__device__ __forceinline__ uint32_t masked(uint32_t word, uint32_t mask, uint32_t exponent) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(exponent));
  return result;
}

// Codes 0 and 4 of a word, exactly: 1024 + q, less 1024.
__device__ __forceinline__ uint32_t even_codes(uint32_t word) {
  const uint32_t biased = masked(word, 0x000F000Fu, 0x64006400u);
  uint32_t result;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(result) : "r"(biased), "r"(0x64006400u));
  return result;
}

// Codes 1 and 5: 64 + q. What is too much is taken from the group's sum.
__device__ __forceinline__ uint32_t odd_codes(uint32_t word) {
  return masked(word, 0x00F000F0u, 0x54005400u);
}

struct Rows {
  uint32_t a[4];
};

template <bool FIRST>
__device__ __forceinline__ void multiply(float* sums, Rows rows, uint32_t low, uint32_t high) {
  if (FIRST) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
        : "r"(rows.a[0]), "r"(rows.a[1]), "r"(rows.a[2]), "r"(rows.a[3]), "r"(low), "r"(high),
          "f"(0.0f));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(rows.a[0]), "r"(rows.a[1]), "r"(rows.a[2]), "r"(rows.a[3]), "r"(low), "r"(high));
  }
}

// Weights are read once: past the first-level cache, which is for x.
__device__ __forceinline__ uint4 load_words(const uint4* words) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(words));
  return v;
}

// A block has a run of column tiles, WARPS_N at a time side by side, and warps_k slices of k.
//
// FRAGMENTS  8-row fragments of x
// AHEAD      groups whose words are in registers; AHEAD * GROUP_TILES is even
// GROUP_TILES  k tiles of a quantization group
template <int FRAGMENTS, int AHEAD, int GROUP_TILES, int THREADS>
__global__ void __launch_bounds__(THREADS, 1) product(
    const uint4* __restrict__ w, const uint4* __restrict__ scales, const half* __restrict__ x,
    half* __restrict__ out, int m, int n, int k, int warps_n, int warps_k) {
  extern __shared__ float scratch[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int nth = warp % warps_n, slice = warp / warps_n;
  const int columns = n / TILE_N, k_tiles = k / TILE_K, groups = k_tiles / GROUP_TILES;
  // The packed layout is written for the lanes of another fragment.
  const int packed_lane = (g >> 2) << 4 | (t >> 1) << 3 | (g & 3) << 1 | (t & 1);
  const int first = (long)columns * blockIdx.x / gridDim.x;
  const int last = (long)columns * (blockIdx.x + 1) / gridDim.x;
  const int first_group = groups * slice / warps_k;
  const int count = groups * (slice + 1) / warps_k - first_group;
  // Rows 0 to 7 sum x, rows 8 to 15 sum 64 x of the odd codes.
  const Rows ones = {{0x3C003C00u, 0u, 0x3C003C00u, 0x54005400u}};

  for (int base = first; base < last; base += warps_n) {
    const int column = base + nth;
    float totals[2][FRAGMENTS][4] = {};
    if (column < last) {
      const uint4* words =
          w + ((size_t)column * k_tiles + (size_t)first_group * GROUP_TILES) * 64 + packed_lane;
      const uint4* factors = scales + ((size_t)column * groups + first_group) * 8 + g;
      const uint4* rows[FRAGMENTS];
      uint4 ahead[AHEAD][GROUP_TILES][2], factors_ahead[AHEAD], runs[2][FRAGMENTS][2];
#pragma unroll
      for (int j = 0; j < FRAGMENTS; ++j) {
        // Rows past the end read the last row: their results are never stored.
        const size_t row = min(8 * j + g, m - 1);
        rows[j] = (const uint4*)(x + row * k + (size_t)first_group * GROUP_TILES * TILE_K + 16 * t);
        runs[0][j][0] = __ldg(rows[j]);
        runs[0][j][1] = __ldg(rows[j] + 1);
      }
#pragma unroll
      for (int d = 0; d < AHEAD; ++d) {
        if (d < count) {
#pragma unroll
          for (int e = 0; e < GROUP_TILES; ++e) {
            ahead[d][e][0] = load_words(words + (d * GROUP_TILES + e) * 64);
            ahead[d][e][1] = load_words(words + (d * GROUP_TILES + e) * 64 + 32);
          }
          factors_ahead[d] = __ldg(factors + d * 8);
        }
      }
      for (int i = 0; i < count; i += AHEAD) {
#pragma unroll
        for (int d = 0; d < AHEAD; ++d) {
          if (i + d >= count) {
            break;
          }
          float products[2][FRAGMENTS][4], sums[FRAGMENTS][4];
#pragma unroll
          for (int e = 0; e < GROUP_TILES; ++e) {
            const int tile = d * GROUP_TILES + e, now = tile & 1;
            const bool more = i + d + 1 < count || e + 1 < GROUP_TILES;
            uint32_t pairs[FRAGMENTS][8];
#pragma unroll
            for (int j = 0; j < FRAGMENTS; ++j) {
              runs[now ^ 1][j][0] = __ldg(rows[j] + (more ? tile + 1 : tile) * 8);
              runs[now ^ 1][j][1] = __ldg(rows[j] + (more ? tile + 1 : tile) * 8 + 1);
              const uint4 low = runs[now][j][0], high = runs[now][j][1];
              const uint32_t lows[4] = {low.x, low.y, low.z, low.w};
              const uint32_t highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
              for (int s = 0; s < 4; ++s) {
                pairs[j][2 * s] = __byte_perm(lows[s], highs[s], 0x5410);
                pairs[j][2 * s + 1] = __byte_perm(lows[s], highs[s], 0x7632);
              }
            }
#pragma unroll
            for (int s = 0; s < 4; ++s) {
              const uint4 word = ahead[d][e][s >> 1];
              const int shift = (s & 1) * 8;
              const uint32_t a = word.x >> shift, b = word.y >> shift;
              const uint32_t c = word.z >> shift, f = word.w >> shift;
              const Rows upper = {{even_codes(a), even_codes(b), odd_codes(a), odd_codes(b)}};
              const Rows lower = {{even_codes(c), even_codes(f), odd_codes(c), odd_codes(f)}};
#pragma unroll
              for (int j = 0; j < FRAGMENTS; ++j) {
                const uint32_t p = pairs[j][2 * s], q = pairs[j][2 * s + 1];
                if (e == 0 && s == 0) {
                  multiply<true>(products[0][j], upper, p, q);
                  multiply<true>(products[1][j], lower, p, q);
                  multiply<true>(sums[j], ones, p, q);
                } else {
                  multiply<false>(products[0][j], upper, p, q);
                  multiply<false>(products[1][j], lower, p, q);
                  multiply<false>(sums[j], ones, p, q);
                }
              }
            }
          }
          float2 factor[4];  // scale and bias of rows g, g + 8, g + 16, g + 24
#pragma unroll
          for (int f = 0; f < 4; ++f) {
            factor[f] = __half22float2(((const half2*)&factors_ahead[d])[f]);
          }
          if (i + d + AHEAD < count) {
#pragma unroll
            for (int e = 0; e < GROUP_TILES; ++e) {
              const uint4* next = words + ((d + AHEAD) * GROUP_TILES + e) * 64;
              ahead[d][e][0] = load_words(next);
              ahead[d][e][1] = load_words(next + 32);
            }
            factors_ahead[d] = __ldg(factors + (d + AHEAD) * 8);
          }
#pragma unroll
          for (int c = 0; c < 8 * FRAGMENTS; ++c) {
            const int half_of = c & 1, f = c >> 1 & 3, j = c >> 3;
            float* total = &totals[f >> 1][j][2 * (f & 1) + half_of];
            const float found = products[f >> 1][j][2 * (f & 1) + half_of] - sums[j][2 + half_of];
            *total = fmaf(factor[f].x, found, fmaf(factor[f].y, sums[j][half_of], *total));
          }
        }
        words += AHEAD * GROUP_TILES * 64;
        factors += AHEAD * 8;
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j) {
          rows[j] += AHEAD * GROUP_TILES * 8;
        }
      }
    }
    float* mine = scratch + (size_t)(slice * warps_n + nth) * 8 * FRAGMENTS * SCRATCH_ROW;
#pragma unroll
    for (int c = 0; c < 8 * FRAGMENTS; ++c) {
      const int half_of = c & 1, f = c >> 1 & 3, j = c >> 3;
      mine[(8 * j + 2 * t + half_of) * SCRATCH_ROW + 8 * f + g] =
          totals[f >> 1][j][2 * (f & 1) + half_of];
    }
    __syncthreads();
    const int here = min(warps_n, last - base);
    for (int line = warp; line < here * m; line += warps_n * warps_k) {
      const int row = line / here, tile = line % here;
      float total = 0.0f;
      for (int s = 0; s < warps_k; ++s) {  // slices in ascending k: the same bits every time
        total += scratch[((size_t)(s * warps_n + tile) * 8 * FRAGMENTS + row) * SCRATCH_ROW + lane];
      }
      out[(size_t)row * n + (base + tile) * TILE_N + lane] = __float2half(total);
    }
    __syncthreads();
  }
}

__global__ void expect(const uint32_t* w, const half* scales, const half* x, double* out, int n,
                       int k, int group_size) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (col >= n) {
    return;
  }
  double total = 0;
  for (int at = 0; at < k; ++at) {
    const int inside = at % TILE_K, pair = inside / 16, q = inside % 16, r = col % 8;
    const int lane = (r >> 2) << 4 | (pair >> 1) << 3 | (r & 3) << 1 | (pair & 1);
    const size_t tile = (size_t)(col / TILE_N) * (k / TILE_K) + at / TILE_K;
    const uint32_t word = w[tile * 256 + q % 8 / 4 * 128 + lane * 4 + col % TILE_N / 8];
    const int code = word >> (q / 8 * 16 + q % 4 * 4) & 15;
    const size_t group = (size_t)(col / TILE_N) * (k / group_size) + at / group_size;
    const half* factor = scales + (group * 8 + r) * 8 + col % TILE_N / 8 * 2;
    const double weight = (double)__half2float(factor[0]) * code + (double)__half2float(factor[1]);
    total += (double)__half2float(x[(size_t)row * k + at]) * weight;
  }
  out[(size_t)row * n + col] = total;
}

__device__ uint32_t drawn(size_t i, uint32_t seed) {
  uint32_t v = (uint32_t)i * 2654435761u + seed;
  v = (v ^ v >> 16) * 0x85ebca6bu;
  v = (v ^ v >> 13) * 0xc2b2ae35u;
  return v ^ v >> 16;
}

__global__ void draw_words(uint32_t* words, size_t count) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    words[i] = drawn(i, 1);
  }
}

__global__ void draw_halves(half* values, size_t count, uint32_t seed, float scale) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    values[i] = __float2half(scale * ((drawn(i, seed) & 0xffff) / 32768.0f - 1));
  }
}

struct Arrays {
  uint32_t* w;
  half *scales, *x, *out;
  double* expected;
};

// Microseconds of a product, or -1 where the block does not fit; exits if a result is wrong.
template <int FRAGMENTS, int AHEAD, int GROUP_TILES, int THREADS>
float microseconds(Arrays arrays, int m, int n, int k, int copies, int blocks, int warps_n,
                   int warps_k) {
  const int bytes = warps_n * warps_k * 8 * FRAGMENTS * SCRATCH_ROW * 4;
  if (warps_k < 1 || warps_n * warps_k * 32 > THREADS || bytes > 227 * 1024) {
    return -1;
  }
  auto kernel = product<FRAGMENTS, AHEAD, GROUP_TILES, THREADS>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const size_t words = (size_t)k * n / 8, factors = (size_t)n * (k / TILE_K / GROUP_TILES) * 2;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  auto launch = [&](int i) {
    kernel<<<blocks, warps_n * warps_k * 32, bytes, stream>>>(
        (const uint4*)(arrays.w + words * (i % copies)),
        (const uint4*)(arrays.scales + factors * (i % copies)), arrays.x, arrays.out, m, n, k,
        warps_n, warps_k);
  };
  CHECK(cudaMemsetAsync(arrays.out, 0xff, (size_t)m * n * 2, stream));
  launch(0);
  CHECK(cudaStreamSynchronize(stream));
  std::vector<half> y((size_t)m * n);
  std::vector<double> expected(y.size());
  CHECK(cudaMemcpy(y.data(), arrays.out, y.size() * 2, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(expected.data(), arrays.expected, y.size() * 8, cudaMemcpyDeviceToHost));
  double off = 0, whole = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    off += std::pow(__half2float(y[i]) - expected[i], 2);
    whole += expected[i] * expected[i];
  }
  if (!(std::sqrt(off / whole) < 1e-3)) {
    std::printf("wrong: relative error %g\n", std::sqrt(off / whole));
    std::exit(1);
  }
  cudaGraph_t graph;
  cudaGraphExec_t run;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < LAUNCHES; ++i) {
    launch(i);
  }
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&run, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int round = 0; round < 7; ++round) {
    float milliseconds;
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(run, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    if (round > 0) {
      times.push_back(milliseconds / LAUNCHES * 1000);
    }
  }
  std::sort(times.begin(), times.end());
  CHECK(cudaGraphExecDestroy(run));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  return times[times.size() / 2];
}

template <int FRAGMENTS>
void measure(Arrays arrays, int m, int n, int k, int copies, int processors) {
  expect<<<dim3((n + 127) / 128, m), 128>>>(arrays.w, arrays.scales, arrays.x, arrays.expected, n,
                                            k, 128);
  CHECK(cudaDeviceSynchronize());
  const int columns = n / TILE_N, blocks = std::min(processors, columns);
  const int most = (columns + blocks - 1) / blocks;
  float best = 1e9f;
  int best_n = 0, best_k = 0;
  for (int warps_n = 1; warps_n <= std::min(most + 1, 8); ++warps_n) {
    for (int warps : {8, 12, 16}) {
      const int warps_k = warps / warps_n;
      const float time = microseconds<FRAGMENTS, 2, 2, 512>(arrays, m, n, k, copies, blocks,
                                                            warps_n, warps_k);
      if (time > 0 && time < best) {
        best = time, best_n = warps_n, best_k = warps_k;
      }
    }
  }
  std::printf("%5d -> %5d, %2d rows: %6.1f us with %d x %d warps (n x k), %d blocks\n", k, n, m,
              best, best_n, best_k, blocks);
}

int main() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  std::printf("%s, %d multiprocessors\n", device.name, device.multiProcessorCount);
  const int shapes[][3] = {{28672, 8192, 4}, {17408, 5120, 8}, {4096, 4096, 24}};
  const size_t words = (size_t)28672 * 8192 / 8 * 4, factors = (size_t)28672 * 64 * 2 * 4;
  Arrays arrays;
  CHECK(cudaMalloc(&arrays.w, words * 4));
  CHECK(cudaMalloc(&arrays.scales, factors * 2));
  CHECK(cudaMalloc(&arrays.x, 8 * 8192 * 2));
  CHECK(cudaMalloc(&arrays.out, 8 * 28672 * 2));
  CHECK(cudaMalloc(&arrays.expected, (size_t)8 * 28672 * 8));
  draw_words<<<1024, 256>>>(arrays.w, words);
  draw_halves<<<1024, 256>>>(arrays.scales, factors, 2, 0.02f);
  draw_halves<<<1024, 256>>>(arrays.x, 8 * 8192, 3, 1.0f);
  for (const auto& [n, k, copies] : shapes) {
    measure<1>(arrays, 1, n, k, copies, device.multiProcessorCount);
    measure<1>(arrays, 8, n, k, copies, device.multiProcessorCount);
  }
}
