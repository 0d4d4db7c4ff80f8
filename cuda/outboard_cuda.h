/*
 * The C interface between the crate and its CUDA library. `src/cuda/sys.rs` declares the same functions and must change
 * with this file.
 *
 * Every function that can fail returns a cudaError_t as int, 0 for success. None of them keeps a pointer, and none
 * waits for the device unless it says so.
 *
 * `device` is a device's ordinal, or OUTBOARD_CUDA_CURRENT_DEVICE. It is the current device during the call, and the
 * calling thread has its own again afterwards (where that one had no context yet, it has one then); only
 * outboard_cuda_enter_thread changes it. Streams, events and device memory are of that device.
 *
 * A call in a thread, or beside one, that captures a CUDA graph leaves the capture as it is. Giving work to a stream
 * that is being captured is cudaErrorStreamCaptureUnsupported (cudaErrorStreamCaptureImplicit for the default stream,
 * while another that it waits for is captured), with nothing started and nothing added to the graph: the work would be
 * repeated with each of the graph's launches, on memory that is used for something else by then.
 *
 * Where a pointer lives is said at each one:
 *   [host]    ordinary host memory, read or written before the function returns;
 *   [device]  memory of the device;
 *   [mapped]  host memory registered with CUDA as mapped, at the address by which the device knows it
 *             (cudaHostGetDevicePointer);
 *   [pinned]  host memory registered with CUDA as mapped, at the host's address;
 *   [CUDA]    no memory, but a handle of CUDA's: a cudaStream_t or a cudaEvent_t;
 *   [NVTX]    no memory, but a handle of NVTX's.
 * Memory that is not [host] is used in the stream's order and must stay valid until the work is done.
 */
#ifndef OUTBOARD_CUDA_H
#define OUTBOARD_CUDA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* In place of an ordinal: the calling thread's current device. */
#define OUTBOARD_CUDA_CURRENT_DEVICE (-1)

/* ---- Dtypes ------------------------------------------------------------------------------------------------------ */

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

/* ---- Updates ----------------------------------------------------------------------------------------------------- */

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

/*
 * A run of `n` elements of one parameter to update in place. The layout is that of `sys::Update`.
 *
 * The planes are contiguous, do not overlap, and are aligned to their own element size; when all are aligned to 16
 * bytes, they are read and written 16 bytes at a time. With `n` = 0 they are not looked at.
 *
 *   weight          [device or mapped]  n of the weight's dtype, read and written
 *   kept            [device or mapped]  n int16 or fp32 as the weight's kind says, read and written; NULL for fp32
 *   grad            [device or mapped]  n of the gradient's dtype, read
 *   exp_avg         [device or mapped]  n of the moments' dtype, read and written
 *   exp_avg_sq      [device or mapped]  n of the moments' dtype, read and written
 *   max_exp_avg_sq  [device or mapped]  n of the moments' dtype, read and written; NULL without amsgrad
 *   first           the parameter's index of the run's element 0; the noise of bf16 moments depends on it
 *   noise_key       `kernel::Noise::key`; used for bf16 moments only
 *   grad_scale      gradients are divided by it first, and not written back; 1 leaves them as they are
 */
typedef struct outboard_cuda_update {
    outboard_cuda_constants constants;
    void *weight;
    void *kept;
    const void *grad;
    void *exp_avg;
    void *exp_avg_sq;
    void *max_exp_avg_sq;
    uint64_t n;
    uint64_t first;
    uint64_t noise_key;
    float grad_scale;
} outboard_cuda_update;

/*
 * Updates a run.
 *
 *   update         [host]  one
 *   per_processor  the most blocks to launch for each multiprocessor: a chunk from the bus needs few, and leaves the
 *                  device to others; 0 fills the device
 *   stream         [CUDA]  NULL is the default stream
 *
 * cudaErrorInvalidValue, with nothing started, for an unknown kind, no update, a run that ends beyond 2^64, and a
 * missing or misaligned plane. With `n` = 0 nothing is started.
 */
int outboard_cuda_adamw(int device, int weight_kind, int grad_kind, int moment_kind, const outboard_cuda_update *update,
                        uint32_t per_processor, void *stream);

/* ---- Work on many runs with one launch --------------------------------------------------------------------------- */

/*
 * These functions take a table:
 *   table        [pinned]  room for what the kernel needs to know of each item, written before the function returns and
 *                          read until the work is done; aligned to 16 bytes
 *   table_bytes  at least OUTBOARD_CUDA_TABLE_ENTRY_BYTES for each item
 * cudaErrorInvalidValue for a table that is missing, misaligned or too small. Items of no length are left out, and with
 * nothing left neither the table nor a device is looked at, and nothing is started.
 */
#define OUTBOARD_CUDA_TABLE_ENTRY_BYTES 192 /* device::TABLE_ENTRY_BYTES */

/*
 * Updates many runs.
 *
 *   updates  [host]  count
 *   refused  [host]  written: the index of the update because of which cudaErrorInvalidValue is returned; `count` where
 *                    no single one is the cause
 *   stream   [CUDA]  NULL is the default stream
 *
 * Errors as for outboard_cuda_adamw.
 */
int outboard_cuda_adamw_many(int device, int weight_kind, int grad_kind, int moment_kind, void *table,
                             uint64_t table_bytes, const outboard_cuda_update *updates, uint64_t count,
                             uint64_t *refused, void *stream);

/*
 * A run of bytes to copy. The layout is that of `sys::Copy`.
 *
 *   to    [device or mapped]  bytes, written; aligned to 2 bytes
 *   from  [device or mapped]  bytes, read; aligned to 2 bytes
 */
typedef struct outboard_cuda_copy {
    void *to;
    const void *from;
    uint64_t bytes;
} outboard_cuda_copy;

/*
 * Does many copies between runs that do not overlap, on few of the device's processors: what it is for is memory across
 * the bus, which is the slower one.
 *
 *   copies  [host]  count
 *   stream  [CUDA]  NULL is the default stream
 *
 * cudaErrorInvalidValue, with nothing started, for a missing or misaligned address.
 */
int outboard_cuda_copy_many(int device, void *table, uint64_t table_bytes, const outboard_cuda_copy *copies,
                            uint64_t count, void *stream);

/*
 * A contiguous gradient. The layout is that of `sys::Grad`.
 *
 *   address  [device or mapped]  n of the dtype, aligned to their size
 *   kind     OUTBOARD_CUDA_GRAD_...
 */
typedef struct outboard_cuda_grad {
    void *address;
    uint64_t n;
    int32_t kind;
} outboard_cuda_grad;

/* Elements whose squares are added up to one partial sum: `kernel::NORM_BLOCK`. */
#define OUTBOARD_CUDA_NORM_BLOCK 4096

/*
 * Adds up the squares of each gradient, divided by `scale` first, in blocks of OUTBOARD_CUDA_NORM_BLOCK elements and in
 * the order of src/kernel/norm.rs.
 *
 *   partials       [pinned]  a double for each block, gradients one after the other, written; aligned to 8 bytes
 *   partial_count  how many doubles there is room for
 *   grads          [host]    count, read only
 *   stream         [CUDA]    NULL is the default stream
 *
 * cudaErrorInvalidValue, with nothing started, for an unknown dtype, a missing or misaligned gradient, and missing,
 * misaligned or too few partials.
 */
int outboard_cuda_squares(int device, void *table, uint64_t table_bytes, double *partials, uint64_t partial_count,
                          const outboard_cuda_grad *grads, uint64_t count, float scale, void *stream);

/*
 * Divides a gradient by `scale` in place, in fp32, rounded once to its dtype.
 *
 *   grad    [host]  one; its elements are read and written
 *   stream  [CUDA]  NULL is the default stream
 *
 * cudaErrorInvalidValue, with nothing started, for an unknown dtype and a missing or misaligned gradient. With `n` = 0
 * nothing is started.
 */
int outboard_cuda_unscale(int device, const outboard_cuda_grad *grad, float scale, void *stream);

/* ---- Threads, streams and events --------------------------------------------------------------------------------- */

/* Makes `device` the calling thread's current device, and lets what the thread does pass beside captures of CUDA graphs
 * in other threads (cudaStreamCaptureModeRelaxed). */
int outboard_cuda_enter_thread(int device);

/* device  [host]  the calling thread's current device, written */
int outboard_cuda_current_device(int *device);

/* A stream that does not wait for the default stream. stream  [host]  written */
int outboard_cuda_stream_create(int device, int high_priority, void **stream);

/* What has been given to the stream is done all the same. stream  [CUDA] */
int outboard_cuda_stream_destroy(int device, void *stream);

/* An event without a time, not recorded yet. event  [host]  written */
int outboard_cuda_event_create(int device, void **event);

/* Also before the event is done. event  [CUDA] */
int outboard_cuda_event_destroy(int device, void *event);

/* Marks what has been given to `stream` so far. event, stream  [CUDA] */
int outboard_cuda_event_record(int device, void *event, void *stream);

/* Whether what is before the mark is done; an event that was never recorded is.
 *   event  [CUDA]
 *   done   [host]  written: 1 or 0 */
int outboard_cuda_event_query(int device, void *event, int *done);

/* Lets what is given to `stream` from now on begin after the event's mark, as it now is. stream, event  [CUDA] */
int outboard_cuda_stream_wait_event(int device, void *stream, void *event);

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

enum {
    OUTBOARD_CUDA_TO_DEVICE = 0,
    OUTBOARD_CUDA_TO_HOST = 1
};

/*
 * Copies `bytes` bytes, by the device itself where the host's side is [pinned] in one piece; else the call may wait.
 *
 *   to, from  one [device], the other host memory, as `direction` says
 *   stream    [CUDA]  NULL is the default stream
 */
int outboard_cuda_copy_async(int device, int direction, void *to, const void *from, uint64_t bytes, void *stream);

/* Pins host memory, for all devices and mapped. start  [pinned from then on]  on a page border */
int outboard_cuda_host_register(int device, void *start, uint64_t bytes);

/* Ends that. May wait for the device. start  [pinned until then]  as it was registered */
int outboard_cuda_host_unregister(int device, void *start);

/* May wait for the device. memory  [host]  written: [device] */
int outboard_cuda_malloc(int device, uint64_t bytes, void **memory);

/* Waits for the device. memory  [device] */
int outboard_cuda_free(int device, void *memory);

/* Whether the device knows [pinned] memory that was registered by its host address: whether that is [mapped], too.
 *   answer  [host]  written: 1 or 0 */
int outboard_cuda_can_address_host(int device, int *answer);

/* ---- Ranges for profilers -------------------------------------------------------------------------------------------- */

/* Whether the library was compiled with NVTX, 1 or 0. Without it the functions below do nothing. They need no device. */
int outboard_cuda_has_ranges(void);

/* An NVTX domain of this name, for good: NULL where no profiler listens. name  [host] */
void *outboard_cuda_range_domain(const char *name);

/* Begins a range, which other threads may end, and others overlap. Returns its number.
 *   domain   [NVTX]  from outboard_cuda_range_domain
 *   message  [host]  UTF-8 */
uint64_t outboard_cuda_range_begin(void *domain, const char *message);

/* Ends a range of this domain. domain  [NVTX] */
void outboard_cuda_range_end(void *domain, uint64_t range);

/* ---- What is there ----------------------------------------------------------------------------------------------- */

/*
 * The number of devices, and the CUDA versions (1000 * major + 10 * minor) that the driver supports and the runtime in
 * this library is; a driver version of 0 means no driver. All three are written whatever is returned. Starts the
 * driver, but makes no context on any device.
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
