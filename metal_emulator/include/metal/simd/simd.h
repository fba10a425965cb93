// Everything is in kernel.h, which comes before every kernel.
