// Text that is put together while a kernel is compiled, for reports.
#pragma once
#include "kernel.h"

namespace emu::tensor {

struct Sentence {
  char text[192] = {};
  u32 length = 0;

  constexpr Sentence& operator<<(const char* part) {
    while (*part && length + 1 < sizeof text) text[length++] = *part++;
    return *this;
  }
  constexpr Sentence& operator<<(int number) {
    if (number < 0) {
      *this << "-";
      number = -number;
    }
    if (number >= 10) *this << number / 10;
    char digit[] = {static_cast<char>('0' + number % 10), 0};
    return *this << digit;
  }
};

}  // namespace emu::tensor

// Ends the threadgroup. The report is the operation's name, which is a sentence here,
// and a number after it.
#define EMU_REFUSE(operation, number) \
  [[clang::nomerge]] mslemu_no_lane(&(operation), number)
