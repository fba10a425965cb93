// The part of the C library that the run time calls, declared by hand so that no system
// header is needed: a machine with only the compiler's wheel has none.
#pragma once
#include "../include/abi.h"

struct TimeSpec {
  long seconds;
  long nanoseconds;
};

extern "C" {
int clock_gettime(int clock, TimeSpec* now);
void* mmap(void* address, unsigned long bytes, int protection, int flags, int fd,
           long at);
int munmap(void* address, unsigned long bytes);
int mprotect(void* address, unsigned long bytes, int protection);
int close(int fd);
int ftruncate(int fd, long bytes);
int getpagesize();
void* malloc(unsigned long bytes);
void free(void* block);
int pthread_create(unsigned long* thread, const void* attributes, void* (*body)(void*),
                   void* argument);
int pthread_join(unsigned long thread, void** result);
int pthread_detach(unsigned long thread);
unsigned long pthread_self();
int pthread_kill(unsigned long thread, int number);
int nanosleep(const TimeSpec* time, TimeSpec* left);
int sched_yield();
#if defined(__APPLE__)
int shm_open(const char* name, int flags, ...);
int shm_unlink(const char* name);
int getpid();
#else
int memfd_create(const char* name, unsigned flags);
#endif
}

namespace emu {

constexpr int kProtNone = 0;
constexpr int kProtRead = 1;
constexpr int kProtReadWrite = 3;
constexpr int kMapShared = 0x01;
constexpr int kMapPrivate = 0x02;
constexpr int kMapFixed = 0x10;
#if defined(__APPLE__)
constexpr int kClockMonotonic = 6;
constexpr int kMapAnonymous = 0x1000;
constexpr int kMapReserve = 0x40;
#else
constexpr int kClockMonotonic = 1;
constexpr int kMapAnonymous = 0x20;
constexpr int kMapReserve = 0x4000;  // MAP_NORESERVE
#endif

inline void* const kMapFailed = reinterpret_cast<void*>(-1);

}  // namespace emu
