// Python runs the handlers of signals in its main thread alone, and only when that
// thread asks. While it runs a kernel, it asks here.
#include "float_mode.h"
#include "runtime.h"

namespace emu {

void attend(Launch* launch) {
  const Python* python = launch->python;
  if (!python || launch->interrupted ||
      !__atomic_exchange_n(&launch->due, 0, __ATOMIC_RELAXED))
    return;
  u64 mode = float_mode();
  set_float_mode(launch->float_mode);
  int state = python->ensure();
  if (python->check_signals()) {
    python->fetch(&launch->raised[0], &launch->raised[1], &launch->raised[2]);
    __atomic_store_n(&launch->interrupted, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&launch->stop, 1, __ATOMIC_RELEASE);
  }
  python->release(state);
  set_float_mode(mode);
}

}  // namespace emu
