// What happens to gradients alone: the sum of their squares, in the order of additions of src/kernel/norm.rs, and the
// division by a gradient scaler's scale. Operations name their rounding, as in recipe.cuh.

#include "dtypes.cuh"
#include "launch.cuh"

#include <string.h>

static_assert(sizeof(outboard_cuda_grad) == 24, "src/cuda/sys.rs asserts the same of Grad");
static_assert(offsetof(outboard_cuda_grad, address) == 0, "");
static_assert(offsetof(outboard_cuda_grad, n) == 8, "");
static_assert(offsetof(outboard_cuda_grad, kind) == 16, "");

namespace outboard {
namespace {

constexpr int THREADS = 256;
constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;
constexpr uint32_t BLOCK = OUTBOARD_CUDA_NORM_BLOCK;
constexpr int LANES = 256;        // partial sums in a block of the norm: not threads
constexpr int OWN = LANES / WARP; // of them are each thread's
constexpr int ROWS = int(BLOCK) / LANES;

// How a gradient is divided by a scale. An IEEE division takes a dozen instructions, more than memory leaves time for;
// for a power of two, which is what scales are, a multiplication by the reciprocal has the same bits.
struct Division {
    static constexpr int BLOCKS = 2; // at once on a processor, of the squares' kernel: more have too few registers
    float scale;
    __device__ float operator()(float x) const { return __fdiv_rn(x, scale); }
};

struct Multiplication {
    static constexpr int BLOCKS = 3;
    float reciprocal;
    __device__ float operator()(float x) const { return __fmul_rn(x, reciprocal); }
};

// Whether a multiplication by 1 / scale does.
bool is_power_of_two(float scale) {
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    const uint32_t exponent = (bits >> 23) & 0xFF;
    // The reciprocal must be a normal number, too.
    return (bits & 0x7FFFFF) == 0 && 1 <= exponent && exponent <= 253;
}

// ---- Squares --------------------------------------------------------------------------------------------------------

// An item of the table. Its tiles are blocks of the norm.
struct Gradient {
    const void *address;
    uint64_t n;
    uint32_t first_tile;
    uint32_t tiles;
    int32_t kind;
    uint32_t aligned; // to 16 bytes
};

// The sum of the squares of `count` elements from element `at`, at most a block, by one warp; in its first thread.
//
// Element i of the block is added to lane i % 256 in order; then lanes are added in halves. V elements are read
// together: V > 1 asks for a whole block and alignment to the vectors.
template <class Grad, int V, class Unscale>
__device__ double warp_squares(const void *grad, uint64_t at, uint32_t count, const Unscale &unscaled) {
    constexpr int GROUPS = OWN / V;                         // of V neighbouring lanes, 32 * V apart
    constexpr int TOGETHER = V == OWN ? 8 : V == 1 ? 1 : 4; // rows under way at once: 128 bytes of vectors
    static_assert(OWN % V == 0 && ROWS % TOGETHER == 0, "");
    const uint32_t thread = threadIdx.x % WARP;

    double sums[OWN] = {}; // [group * V + k] is that of lane group * 32 * V + thread * V + k
#pragma unroll 1
    for (int first_row = 0; first_row < ROWS; first_row += TOGETHER) {
        Pack<typename Grad::Stored, V> packs[TOGETHER][GROUPS];
#pragma unroll
        for (int row = 0; row < TOGETHER; ++row) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const uint32_t i = (first_row + row) * LANES + group * WARP * V + thread * V;
                if (V > 1 || i < count) packs[row][group] = read<V, typename Grad::Stored>(grad, at + i);
            }
        }
#pragma unroll
        for (int row = 0; row < TOGETHER; ++row) {
#pragma unroll
            for (int own = 0; own < OWN; ++own) {
                const uint32_t i = (first_row + row) * LANES + own * WARP + thread; // for V = 1
                if (V == 1 && i >= count) continue;
                const double x = double(unscaled(Grad::load(packs[row][own / V].at[own % V])));
                sums[own] = __fma_rn(x, x, sums[own]); // the square is exact: fusing changes nothing
            }
        }
    }

#pragma unroll
    for (int half = OWN / 2; half >= V; half /= 2) {
#pragma unroll
        for (int own = 0; own < half; ++own) sums[own] = __dadd_rn(sums[own], sums[own + half]);
    }
#pragma unroll
    for (int half = WARP / 2; half > 0; half /= 2) {
        // The upper half of the threads adds numbers of no meaning from here on.
#pragma unroll
        for (int k = 0; k < V; ++k) sums[k] = __dadd_rn(sums[k], __shfl_down_sync(0xFFFFFFFF, sums[k], half));
    }
#pragma unroll
    for (int half = V / 2; half > 0; half /= 2) {
#pragma unroll
        for (int k = 0; k < half; ++k) sums[k] = __dadd_rn(sums[k], sums[k + half]);
    }
    return sums[0];
}

template <class Grad, class Unscale>
__device__ double block_squares(const Gradient &gradient, uint64_t at, const Unscale &unscaled) {
    constexpr int VECTOR = 16 / sizeof(typename Grad::Stored);
    const uint64_t left = gradient.n - at;
    if (gradient.aligned && left >= BLOCK) return warp_squares<Grad, VECTOR>(gradient.address, at, BLOCK, unscaled);
    return warp_squares<Grad, 1>(gradient.address, at, uint32_t(min(left, uint64_t(BLOCK))), unscaled);
}

// Each warp has a run of the norm's blocks. It writes their sums 32 at a time, since they go across the bus.
template <class Unscale>
__global__ void __launch_bounds__(THREADS, Unscale::BLOCKS)
    squares(const __grid_constant__ Lookup lookup, const Gradient *__restrict__ table, double *partials,
            const __grid_constant__ Unscale unscaled) {
    const uint32_t warp = blockIdx.x * WARPS + threadIdx.x / WARP;
    const uint32_t warps = gridDim.x * WARPS;
    const uint32_t thread = threadIdx.x % WARP;
    const uint32_t begin = part_begin(lookup, warp, warps);
    const uint32_t end = part_begin(lookup, warp + 1, warps);
    if (begin == end) return;

    uint32_t item = find(lookup, table, begin);
    Gradient gradient = table[item];
    double kept = 0.0; // this thread's of the last 32 sums
    for (uint32_t tile = begin; tile < end; ++tile) {
        if (tile - gradient.first_tile == gradient.tiles) gradient = table[++item];
        const uint64_t at = uint64_t(tile - gradient.first_tile) * BLOCK;
        double sum;
        switch (gradient.kind) {
        case OUTBOARD_CUDA_GRAD_F32: sum = block_squares<F32>(gradient, at, unscaled); break;
        case OUTBOARD_CUDA_GRAD_BF16: sum = block_squares<Bf16>(gradient, at, unscaled); break;
        default: sum = block_squares<F16>(gradient, at, unscaled); break;
        }
        sum = __shfl_sync(0xFFFFFFFF, sum, 0);
        const uint32_t slot = (tile - begin) % WARP;
        if (thread == slot) kept = sum;
        if (slot == WARP - 1 || tile + 1 == end) {
            if (thread <= slot) partials[tile - slot + thread] = kept;
        }
    }
}

template <class Unscale>
cudaError_t launch_squares(int device, Gradient *table, double *partials, Lookup lookup, Unscale unscaled,
                           void *stream) {
    const Call call(device, stream);
    if (call.error != cudaSuccess) return call.error;
    static PerDevice known;
    const auto kernel = reinterpret_cast<const void *>(&squares<Unscale>);
    int resident;
    cudaError_t error = resident_blocks(call, kernel, THREADS, known, &resident);
    if (error != cudaSuccess) return error;
    error = as_mapped(call, table, &table);
    if (error != cudaSuccess) return error;
    error = as_mapped(call, partials, &partials);
    if (error != cudaSuccess) return error;
    void *arguments[] = {&lookup, &table, &partials, &unscaled};
    const uint64_t wanted = (uint64_t(lookup.tiles) + WARPS - 1) / WARPS;
    return launch(kernel, grid(wanted, uint64_t(resident)), THREADS, arguments, stream);
}

// ---- Unscaling ------------------------------------------------------------------------------------------------------

template <class Grad, class Unscale>
__global__ void __launch_bounds__(THREADS) unscale(void *grad, uint64_t n, const __grid_constant__ Unscale unscaled) {
    using Stored = typename Grad::Stored;
    constexpr int VECTOR = 16 / sizeof(Stored);
    const uint64_t thread = uint64_t(blockIdx.x) * THREADS + threadIdx.x;
    const uint64_t threads = uint64_t(gridDim.x) * THREADS;
    // Single elements up to a border of 16 bytes, vectors, and what is left.
    const uint64_t misaligned = reinterpret_cast<uintptr_t>(grad) % 16 / sizeof(Stored);
    const uint64_t head = min(n, (VECTOR - misaligned) % VECTOR);
    const uint64_t tail = head + (n - head) / VECTOR * VECTOR;

    const auto single = [&](uint64_t at) {
        auto pack = read<1, Stored>(grad, at);
        pack.at[0] = Grad::store_nearest(unscaled(Grad::load(pack.at[0])));
        write<1>(grad, at, pack);
    };
    if (thread < head) single(thread);
    for (uint64_t at = head + thread * VECTOR; at < tail; at += threads * VECTOR) {
        auto pack = read<VECTOR, Stored>(grad, at);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) pack.at[i] = Grad::store_nearest(unscaled(Grad::load(pack.at[i])));
        write<VECTOR>(grad, at, pack);
    }
    if (thread < n - tail) single(tail + thread);
}

template <class Grad, class Unscale>
cudaError_t launch_unscale(int device, const outboard_cuda_grad &grad, Unscale unscaled, void *stream) {
    const Call call(device, stream);
    if (call.error != cudaSuccess) return call.error;
    static PerDevice known;
    const auto kernel = reinterpret_cast<const void *>(&unscale<Grad, Unscale>);
    int resident;
    const cudaError_t error = resident_blocks(call, kernel, THREADS, known, &resident);
    if (error != cudaSuccess) return error;
    void *address = grad.address;
    uint64_t n = grad.n;
    void *arguments[] = {&address, &n, &unscaled};
    return launch(kernel, grid((n + THREADS - 1) / THREADS, uint64_t(resident)), THREADS, arguments, stream);
}

template <class Unscale>
cudaError_t launch_unscale(int device, const outboard_cuda_grad &grad, Unscale unscaled, void *stream) {
    switch (grad.kind) {
    case OUTBOARD_CUDA_GRAD_F32: return launch_unscale<F32>(device, grad, unscaled, stream);
    case OUTBOARD_CUDA_GRAD_BF16: return launch_unscale<Bf16>(device, grad, unscaled, stream);
    default: return launch_unscale<F16>(device, grad, unscaled, stream);
    }
}

// The bytes of an element, 0 for an unknown dtype.
size_t element_bytes(int kind) {
    switch (kind) {
    case OUTBOARD_CUDA_GRAD_F32: return 4;
    case OUTBOARD_CUDA_GRAD_BF16:
    case OUTBOARD_CUDA_GRAD_F16: return 2;
    default: return 0;
    }
}

bool is_gradient(const outboard_cuda_grad &grad) {
    const size_t element = element_bytes(grad.kind);
    return element != 0 && grad.n <= INT64_MAX && (grad.n == 0 || is_plane(grad.address, element));
}

} // namespace
} // namespace outboard

extern "C" int outboard_cuda_squares(int device, void *table, uint64_t table_bytes, double *partials,
                                     uint64_t partial_count, const outboard_cuda_grad *grads, uint64_t count,
                                     float scale, void *stream) {
    using namespace outboard;
    if (grads == nullptr && count > 0) return cudaErrorInvalidValue;
    Table<Gradient> gradients(table, table_bytes, count);
    for (uint64_t i = 0; i < count; ++i) {
        if (!is_gradient(grads[i])) return cudaErrorInvalidValue;
        if (grads[i].n == 0) continue;
        Gradient gradient{};
        gradient.address = grads[i].address;
        gradient.n = grads[i].n;
        gradient.kind = grads[i].kind;
        gradient.aligned = is_aligned(gradient.address, 16);
        if (!gradients.add(gradient, (gradient.n + BLOCK - 1) / BLOCK)) return cudaErrorInvalidValue;
    }
    if (gradients.is_empty()) return cudaSuccess;
    const Lookup &lookup = gradients.lookup();
    if (!is_plane(partials, sizeof(double)) || partial_count < lookup.tiles) return cudaErrorInvalidValue;
    Gradient *items = static_cast<Gradient *>(table);
    if (is_power_of_two(scale)) {
        return launch_squares(device, items, partials, lookup, Multiplication{1.0f / scale}, stream);
    }
    return launch_squares(device, items, partials, lookup, Division{scale}, stream);
}

extern "C" int outboard_cuda_unscale(int device, const outboard_cuda_grad *grad, float scale, void *stream) {
    using namespace outboard;
    if (grad == nullptr || !is_gradient(*grad)) return cudaErrorInvalidValue;
    if (grad->n == 0) return cudaSuccess;
    if (is_power_of_two(scale)) return launch_unscale(device, *grad, Multiplication{1.0f / scale}, stream);
    return launch_unscale(device, *grad, Division{scale}, stream);
}
