// How a host thread treats float32 denormals: zero on the GPU, kept by everybody else.
#pragma once
#include "../include/abi.h"

namespace emu {

#if defined(__x86_64__)
constexpr u64 kFlushing = 0x8040;
inline u64 float_mode() {
  u32 mode;
  asm volatile("stmxcsr %0" : "=m"(mode));
  return mode;
}
inline void set_float_mode(u64 mode) {
  u32 value = u32(mode);
  asm volatile("ldmxcsr %0" ::"m"(value));
}
#else
constexpr u64 kFlushing = 1ull << 24;
inline u64 float_mode() {
  u64 mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_float_mode(u64 mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#endif

}  // namespace emu
