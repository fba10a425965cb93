// Runs kernels without Python: the run time and what `KERNELS` names are linked into one
// program. Every kernel gets 64 floats 0, 1, ... and writes 64; a line tells how it ended.
#include "../../../metal_emulator/runtime/runtime.h"

namespace emu {
struct Region {
  u8* host;
  u8* device;
  u64 bytes;
  u8* reserved;
  u64 reserved_bytes;
};
}  // namespace emu

using namespace emu;

extern "C" {
int printf(const char* format, ...);
int mslemu_region_open(Region* region, u64 bytes, int writable);
void* mslemu_place(const Region* region, const void* source, u64 bytes, u32 residue);
u32 mslemu_launch(Launch* launch);
#define KERNEL(name) void name();
KERNELS
#undef KERNEL
}

namespace {

ThreadState states[kMaxThreads];

void run(const char* name, Body body) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = float(i);
  Region input, output;
  if (mslemu_region_open(&input, sizeof values, 0)) return;
  if (mslemu_region_open(&output, sizeof values, 1)) return;
  void* buffers[] = {mslemu_place(&input, values, sizeof values, 0),
                     mslemu_place(&output, nullptr, sizeof values, 0)};
  Launch launch{};
  launch.entry = body;
  launch.buffers = buffers;
  launch.grid = launch.threadgroup = {64, 1, 1};
  launch.workers = 1;
  launch.states = states;
  launch.time_limit = ~u64(0);
  launch.resident = 1;
  const Report& report = launch.report;
  u32 fault = mslemu_launch(&launch);
  u64 instruction = 0;
  if (fault == u32(Fault::kInstruction))
    instruction = *static_cast<const u32*>(report.trace[0]);
  printf("%s %u %u %lld %llu", name, fault, report.thread,
         report.address - u64(buffers[0]), instruction);
  for (int i = 0; i < 64; ++i) printf(" %a", double(static_cast<float*>(buffers[1])[i]));
  printf("\n");
}

}  // namespace

// Without a hosted C++ it would be an ordinary function.
extern "C" int main() {
#define KERNEL(name) run(#name, name);
  KERNELS
  return 0;
}
