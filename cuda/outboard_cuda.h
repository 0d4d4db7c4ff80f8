/*
 * The C interface between the crate and its CUDA library. `src/cuda/sys.rs` declares the same functions and must change
 * with this file.
 *
 * Every function that can fail returns a cudaError_t as int, 0 for success. None of them waits for the device, keeps a
 * pointer, or changes the calling thread's current device.
 *
 * Where a pointer lives is said at each one:
 *   [host]    ordinary host memory, read or written before the function returns;
 *   [device]  device memory of the calling thread's current device;
 *   [mapped]  host memory registered with CUDA as mapped, at the address by which the device knows it
 *             (cudaHostGetDevicePointer).
 * Memory that is not [host] is used in the stream's order and must stay valid until the work is done.
 */
#ifndef OUTBOARD_CUDA_H
#define OUTBOARD_CUDA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The constants of one group at one step. The layout is that of `kernel::Constants`, where each is explained. */
typedef struct outboard_cuda_constants {
    float gradient_factor;
    float lerp_factor;
    float beta2;
    float one_minus_beta2;
    float step_size;
    float bias_correction2_sqrt;
    float eps;
    float decay_factor;
    float coupled_decay;
    uint32_t lerp_from_gradient;
} outboard_cuda_constants;

/* The dtype of the live weight, and what is kept beside it. */
enum {
    OUTBOARD_CUDA_WEIGHT_F32 = 0,        /* fp32, its own master: nothing is kept */
    OUTBOARD_CUDA_WEIGHT_BF16_SPLIT = 1, /* bf16, with an int16 residual */
    OUTBOARD_CUDA_WEIGHT_BF16_FULL = 2,  /* bf16, with an fp32 master */
    OUTBOARD_CUDA_WEIGHT_F16_FULL = 3    /* fp16, with an fp32 master */
};

/* The dtype of the gradient. */
enum {
    OUTBOARD_CUDA_GRAD_F32 = 0,
    OUTBOARD_CUDA_GRAD_BF16 = 1,
    OUTBOARD_CUDA_GRAD_F16 = 2
};

/* The dtype of the moments. */
enum {
    OUTBOARD_CUDA_MOMENT_F32 = 0,
    OUTBOARD_CUDA_MOMENT_BF16 = 1 /* rounded stochastically when stored */
};

/*
 * Updates a run of `n` elements of one parameter, in place, in the order of `stream`.
 *
 * The planes are contiguous, do not overlap, and are aligned to their own element size; when all are aligned to 16
 * bytes, they are read and written 16 bytes at a time.
 *
 *   weight          [device or mapped]  n of the weight's dtype, read and written
 *   kept            [device or mapped]  n int16 or fp32 as `weight_kind` says, read and written; NULL for fp32 weights
 *   grad            [device or mapped]  n of the gradient's dtype, read
 *   exp_avg         [device or mapped]  n of the moments' dtype, read and written
 *   exp_avg_sq      [device or mapped]  n of the moments' dtype, read and written
 *   max_exp_avg_sq  [device or mapped]  n of the moments' dtype, read and written; NULL without amsgrad
 *   first           the parameter's index of the run's element 0; the noise of bf16 moments depends on it
 *   constants       [host]              one
 *   noise_key       `kernel::Noise::key`; used for bf16 moments only
 *   grad_scale      gradients are divided by it first, and not written back; 1 leaves them as they are
 *   stream          a cudaStream_t of the current device; NULL is the default stream
 *
 * cudaErrorInvalidValue, with nothing started, for an unknown kind, a negative `n`, a run that ends beyond 2^64, and a
 * missing or misaligned plane. With `n` = 0 the planes are not looked at and nothing is started.
 */
int outboard_cuda_adamw(int weight_kind, int grad_kind, int moment_kind, void *weight, void *kept, const void *grad,
                        void *exp_avg, void *exp_avg_sq, void *max_exp_avg_sq, int64_t n, uint64_t first,
                        const outboard_cuda_constants *constants, uint64_t noise_key, float grad_scale, void *stream);

/*
 * What is there: the number of devices, and the CUDA versions (1000 * major + 10 * minor) that the driver supports and
 * the runtime in this library is; a driver version of 0 means no driver. All three are written whatever is returned.
 * Starts the driver, but makes no context on any device.
 *
 *   devices, driver_version, runtime_version  [host]  one each, written
 */
int outboard_cuda_probe(int *devices, int *driver_version, int *runtime_version);

/* CUDA's name of an error (cudaErrorInvalidValue) and its explanation. Static strings, never NULL. */
const char *outboard_cuda_error_name(int error);
const char *outboard_cuda_error_string(int error);

#ifdef __cplusplus
}
#endif

#endif
