"""Compiled CUDA kernels that are kept between processes.

MLX (0.32.4) compiles a kernel of `mx.fast.cuda_kernel` again in each process: it looks
in its folder of compiled kernels for any kernel, but writes only its own there. This
package compiles ours with NVRTC as MLX does, keeps the machine code in the user's
cache, and puts a copy into MLX's folder before MLX looks. Calls are those of
`mx.fast.cuda_kernel`, at the same cost.

If something fails, MLX compiles the kernel itself, after one warning per process.
"""
