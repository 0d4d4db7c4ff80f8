// AdamW and Adam for a run of elements, on the device: the recipe of src/kernel/recipe.rs, with the same bits.
//
// That file is the reference on the CPU; the functions below have the names they have there (load and store of each
// dtype come from src/kernel/convert.rs and master.rs, the noise from noise.rs), and the tests in src/cuda compare the
// two for every combination of dtypes. In words, all in fp32 and correctly rounded, fused only where it says fma:
//
//     g = gradient_factor * (grad / grad_scale)                     [Adam: g = fma(p, coupled_decay, g)]
//     m = fma(lerp_factor, g - m, m)                                [or + g: lerp from the gradient's end]
//     v = fma(one_minus_beta2 * g, g, beta2 * v)                    [amsgrad: the root is that of max(max, v)]
//     p = p * decay_factor - (step_size * m) / (sqrt(v) / bias_correction2_sqrt + eps)
//
// Every operation is spelt as an intrinsic that names its rounding, since the compiler may contract a plain a * b + c
// into an fma. Nothing here may be compiled with fast math or flush-to-zero.
//
// The kernel is bound by memory wherever the planes live, so it is written to be read: one body for vectors and single
// elements, amsgrad and the scale tested at run time.

#include "outboard_cuda.h"

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

static_assert(sizeof(outboard_cuda_constants) == 40, "src/cuda/mod.rs asserts the same of kernel::Constants");
static_assert(offsetof(outboard_cuda_constants, gradient_factor) == 0, "");
static_assert(offsetof(outboard_cuda_constants, lerp_factor) == 4, "");
static_assert(offsetof(outboard_cuda_constants, beta2) == 8, "");
static_assert(offsetof(outboard_cuda_constants, one_minus_beta2) == 12, "");
static_assert(offsetof(outboard_cuda_constants, step_size) == 16, "");
static_assert(offsetof(outboard_cuda_constants, bias_correction2_sqrt) == 20, "");
static_assert(offsetof(outboard_cuda_constants, eps) == 24, "");
static_assert(offsetof(outboard_cuda_constants, decay_factor) == 28, "");
static_assert(offsetof(outboard_cuda_constants, coupled_decay) == 32, "");
static_assert(offsetof(outboard_cuda_constants, lerp_from_gradient) == 36, "");

namespace {

constexpr int THREADS = 256;

// What a launch passes to the kernel. The planes' homes and shapes are those of outboard_cuda_adamw.
struct Update {
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
    uint32_t noise_stream; // the stream of element `first`
    float grad_scale;
    bool aligned; // every plane, to 16 bytes
};

// ---- Conversions, as in src/kernel/convert.rs -----------------------------------------------------------------------

__device__ bool is_nan(float value) { return (__float_as_uint(value) & 0x7FFFFFFF) > 0x7F800000; }

__device__ float bf16_to_f32(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }

__device__ uint16_t f32_to_bf16(float value) {
    const uint32_t bits = __float_as_uint(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return is_nan(value) ? 0x7FC0 : uint16_t(rounded);
}

__device__ uint16_t f32_to_bf16_stochastic(float value, uint32_t noise) {
    const uint32_t bits = __float_as_uint(value);
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude >= 0x7F800000) return magnitude > 0x7F800000 ? 0x7FC0 : uint16_t(bits >> 16);
    return uint16_t((bits + (noise & 0xFFFF)) >> 16);
}

__device__ float f16_to_f32(uint16_t bits) {
    const uint32_t sign = (uint32_t(bits) & 0x8000) << 16;
    const uint32_t magnitude = uint32_t(bits) & 0x7FFF;
    const float finite = __fmul_rn(__uint_as_float(magnitude << 13), __uint_as_float(0x77800000)); // times 2^112
    const uint32_t special = (magnitude << 13) | 0x7F800000;
    return __uint_as_float(sign | (magnitude >= 0x7C00 ? special : __float_as_uint(finite)));
}

__device__ uint16_t f32_to_f16(float value) {
    const uint32_t bits = is_nan(value) ? 0x7FC00000 : __float_as_uint(value);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    const uint32_t normal = (magnitude - (112u << 23) + 0x0FFF + ((magnitude >> 13) & 1)) >> 13;
    // 0.5 has the spacing of fp16's denormals: the addition rounds to it.
    const uint32_t denormal = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3F000000;
    const uint32_t special = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
    const uint32_t small = magnitude < 0x38800000 ? denormal : normal;
    return uint16_t(sign | (magnitude >= 0x47800000 ? special : small));
}

// ---- Noise, as in src/kernel/noise.rs -------------------------------------------------------------------------------

__host__ __device__ uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// The key for the 2^32 elements around `index`.
__host__ __device__ uint32_t noise_stream(uint64_t key, uint64_t index) {
    const uint64_t mixed = mix64(key ^ (index >> 32));
    return uint32_t(mixed ^ (mixed >> 32));
}

__device__ uint32_t hash32(uint32_t stream, uint32_t low) {
    uint32_t x = (low * 0x9E3779B1u) ^ stream;
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

// ---- Dtypes: how each is stored, and how it makes an fp32 value and back --------------------------------------------

// A gradient or a moment.
struct F32 {
    using Stored = float;
    static constexpr bool STOCHASTIC = false;
    static __device__ float load(float stored) { return stored; }
    static __device__ float store(float value, uint32_t) { return value; }
    static __device__ float store_nearest(float value) { return value; }
};

// A gradient or a moment.
struct Bf16 {
    using Stored = uint16_t;
    static constexpr bool STOCHASTIC = true;
    static __device__ float load(uint16_t stored) { return bf16_to_f32(stored); }
    static __device__ uint16_t store(float value, uint32_t noise) { return f32_to_bf16_stochastic(value, noise); }
    static __device__ uint16_t store_nearest(float value) { return f32_to_bf16(value); }
};

// A gradient.
struct F16 {
    using Stored = uint16_t;
    static __device__ float load(uint16_t stored) { return f16_to_f32(stored); }
};

// Weights, as in src/kernel/master.rs. `Kept` is what is kept beside the live weight.
struct Plain {
    using Live = float;
    using Kept = float; // never touched
    static constexpr bool HAS_KEPT = false;
    static __device__ float load(float live, float) { return live; }
    static __device__ void store(float value, float &live, float &) { live = value; }
};

struct SplitBf16 {
    using Live = uint16_t;
    using Kept = int16_t;
    static constexpr bool HAS_KEPT = true;
    static __device__ float load(uint16_t weight, int16_t residual) {
        const uint32_t high = uint32_t(weight) << 16;
        const uint32_t sum = high + uint32_t(int32_t(residual));
        const bool changes_sign = ((sum ^ high) & 0x80000000) != 0;
        const bool is_odd_tie = residual == INT16_MIN && (weight & 1) == 1;
        const bool stale = changes_sign || is_nan(__uint_as_float(sum)) || is_odd_tie;
        return __uint_as_float(stale ? high : sum);
    }
    static __device__ void store(float master, uint16_t &weight, int16_t &residual) {
        weight = f32_to_bf16(master);
        const int32_t difference = int32_t(__float_as_uint(master) - (uint32_t(weight) << 16));
        residual = is_nan(master) ? 0 : int16_t(min(difference, int32_t(INT16_MAX)));
    }
};

struct FullBf16 {
    using Live = uint16_t;
    using Kept = float;
    static constexpr bool HAS_KEPT = true;
    static __device__ float load(uint16_t weight, float master) {
        return f32_to_bf16(master) == weight ? master : bf16_to_f32(weight);
    }
    static __device__ void store(float value, uint16_t &weight, float &master) {
        weight = f32_to_bf16(value);
        master = value;
    }
};

struct FullF16 {
    using Live = uint16_t;
    using Kept = float;
    static constexpr bool HAS_KEPT = true;
    static __device__ float load(uint16_t weight, float master) {
        return f32_to_f16(master) == weight ? master : f16_to_f32(weight);
    }
    static __device__ void store(float value, uint16_t &weight, float &master) {
        weight = f32_to_f16(value);
        master = value;
    }
};

// ---- The kernel -----------------------------------------------------------------------------------------------------

// N elements that are read and written together, 16 bytes at a time where there are as many.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T at[N];
};

template <int N, class T>
__device__ Pack<T, N> read(const void *plane, uint64_t at) {
    return *reinterpret_cast<const Pack<T, N> *>(static_cast<const T *>(plane) + at);
}

template <int N, class T>
__device__ void write(void *plane, uint64_t at, const Pack<T, N> &pack) {
    *reinterpret_cast<Pack<T, N> *>(static_cast<T *>(plane) + at) = pack;
}

// Elements `at` to `at + N`. For N > 1 all planes are aligned to 16 bytes, and `at` is a multiple of N.
template <class Weight, class Grad, class Moment, int N>
__device__ void update(const Update &u, uint64_t at) {
    const outboard_cuda_constants &c = u.constants;
    const bool amsgrad = u.max_exp_avg_sq != nullptr;

    auto live = read<N, typename Weight::Live>(u.weight, at);
    Pack<typename Weight::Kept, N> kept{};
    if constexpr (Weight::HAS_KEPT) kept = read<N, typename Weight::Kept>(u.kept, at);
    const auto grad = read<N, typename Grad::Stored>(u.grad, at);
    auto exp_avg = read<N, typename Moment::Stored>(u.exp_avg, at);
    auto exp_avg_sq = read<N, typename Moment::Stored>(u.exp_avg_sq, at);
    Pack<typename Moment::Stored, N> max_exp_avg_sq{};
    if (amsgrad) max_exp_avg_sq = read<N, typename Moment::Stored>(u.max_exp_avg_sq, at);

#pragma unroll
    for (int i = 0; i < N; ++i) {
        float p = Weight::load(live.at[i], kept.at[i]);
        float g = Grad::load(grad.at[i]);
        if (u.grad_scale != 1.0f) g = __fdiv_rn(g, u.grad_scale);
        g = __fmul_rn(c.gradient_factor, g);
        if (c.coupled_decay != 0.0f) g = __fmaf_rn(p, c.coupled_decay, g);

        float m = Moment::load(exp_avg.at[i]);
        m = __fmaf_rn(c.lerp_factor, __fsub_rn(g, m), c.lerp_from_gradient != 0 ? g : m);
        const float v = __fmaf_rn(__fmul_rn(c.one_minus_beta2, g), g,
                                  __fmul_rn(c.beta2, Moment::load(exp_avg_sq.at[i])));
        uint32_t noise = 0;
        if constexpr (Moment::STOCHASTIC) {
            const uint64_t index = u.first + at + i;
            const bool same_span = index >> 32 == u.first >> 32;
            noise = hash32(same_span ? u.noise_stream : noise_stream(u.noise_key, index), uint32_t(index));
        }
        exp_avg.at[i] = Moment::store(m, noise & 0xFFFF);
        exp_avg_sq.at[i] = Moment::store(v, noise >> 16);

        float root = v;
        if (amsgrad) {
            const float max = Moment::load(max_exp_avg_sq.at[i]);
            root = v > max || is_nan(v) ? v : max; // not fmaxf, which drops a NaN
            max_exp_avg_sq.at[i] = Moment::store_nearest(root);
        }
        const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(root), c.bias_correction2_sqrt), c.eps);
        p = __fmul_rn(p, c.decay_factor);
        p = __fsub_rn(p, __fdiv_rn(__fmul_rn(c.step_size, m), denominator));
        Weight::store(p, live.at[i], kept.at[i]);
    }

    write<N>(u.weight, at, live);
    if constexpr (Weight::HAS_KEPT) write<N>(u.kept, at, kept);
    write<N>(u.exp_avg, at, exp_avg);
    write<N>(u.exp_avg_sq, at, exp_avg_sq);
    if (amsgrad) write<N>(u.max_exp_avg_sq, at, max_exp_avg_sq);
}

template <class Weight, class Grad, class Moment>
__global__ void __launch_bounds__(THREADS) adamw(const Update u) {
    // The narrowest plane gets one 16-byte access, wider ones two.
    constexpr bool all_fp32 = sizeof(typename Weight::Live) == 4 && sizeof(typename Grad::Stored) == 4 &&
                              sizeof(typename Moment::Stored) == 4;
    constexpr int WIDTH = all_fp32 ? 4 : 8;

    const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
    const uint64_t vectors = u.aligned ? u.n / WIDTH : 0;
    for (uint64_t i = thread; i < vectors; i += threads) update<Weight, Grad, Moment, WIDTH>(u, i * WIDTH);
    for (uint64_t i = vectors * WIDTH + thread; i < u.n; i += threads) update<Weight, Grad, Moment, 1>(u, i);
}

// ---- The launcher ---------------------------------------------------------------------------------------------------

// Notes a plane's alignment: whether it is there and aligned to its elements, and whether to 16 bytes too.
struct Alignment {
    bool valid = true;
    bool sixteen = true;

    void plane(const void *pointer, size_t element) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
        valid = valid && address != 0 && address % element == 0;
        sixteen = sixteen && address % 16 == 0;
    }
};

template <class Weight, class Grad, class Moment>
cudaError_t launch(Update u, cudaStream_t stream) {
    Alignment alignment;
    alignment.plane(u.weight, sizeof(typename Weight::Live));
    if (Weight::HAS_KEPT) alignment.plane(u.kept, sizeof(typename Weight::Kept));
    alignment.plane(u.grad, sizeof(typename Grad::Stored));
    alignment.plane(u.exp_avg, sizeof(typename Moment::Stored));
    alignment.plane(u.exp_avg_sq, sizeof(typename Moment::Stored));
    if (u.max_exp_avg_sq != nullptr) alignment.plane(u.max_exp_avg_sq, sizeof(typename Moment::Stored));
    if (!alignment.valid) return cudaErrorInvalidValue;
    u.aligned = alignment.sixteen;
    u.noise_stream = noise_stream(u.noise_key, u.first);

    // As many blocks as the device can hold at once; they stride over what is more.
    const auto kernel = adamw<Weight, Grad, Moment>;
    int device, processors, blocks_per_processor;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_processor, kernel, THREADS, 0);
    if (error != cudaSuccess) return error;
    const uint64_t most = uint64_t(processors) * blocks_per_processor;
    const uint64_t wanted = (u.n + THREADS - 1) / THREADS;
    const dim3 grid(uint32_t(wanted < most ? wanted : most));

    // Unlike <<<>>>, this returns the launch's own error.
    void *arguments[] = {&u};
    return cudaLaunchKernel(kernel, grid, dim3(THREADS), arguments, 0, stream);
}

template <class Weight, class Grad>
cudaError_t with_moment(int moment_kind, const Update &u, cudaStream_t stream) {
    switch (moment_kind) {
    case OUTBOARD_CUDA_MOMENT_F32: return launch<Weight, Grad, F32>(u, stream);
    case OUTBOARD_CUDA_MOMENT_BF16: return launch<Weight, Grad, Bf16>(u, stream);
    default: return cudaErrorInvalidValue;
    }
}

template <class Weight>
cudaError_t with_grad(int grad_kind, int moment_kind, const Update &u, cudaStream_t stream) {
    switch (grad_kind) {
    case OUTBOARD_CUDA_GRAD_F32: return with_moment<Weight, F32>(moment_kind, u, stream);
    case OUTBOARD_CUDA_GRAD_BF16: return with_moment<Weight, Bf16>(moment_kind, u, stream);
    case OUTBOARD_CUDA_GRAD_F16: return with_moment<Weight, F16>(moment_kind, u, stream);
    default: return cudaErrorInvalidValue;
    }
}

bool between(int value, int first, int last) { return first <= value && value <= last; }

} // namespace

extern "C" int outboard_cuda_adamw(int weight_kind, int grad_kind, int moment_kind, void *weight, void *kept,
                                   const void *grad, void *exp_avg, void *exp_avg_sq, void *max_exp_avg_sq, int64_t n,
                                   uint64_t first, const outboard_cuda_constants *constants, uint64_t noise_key,
                                   float grad_scale, void *stream) {
    const bool known = between(weight_kind, OUTBOARD_CUDA_WEIGHT_F32, OUTBOARD_CUDA_WEIGHT_F16_FULL) &&
                       between(grad_kind, OUTBOARD_CUDA_GRAD_F32, OUTBOARD_CUDA_GRAD_F16) &&
                       between(moment_kind, OUTBOARD_CUDA_MOMENT_F32, OUTBOARD_CUDA_MOMENT_BF16);
    if (!known || n < 0 || constants == nullptr || first > UINT64_MAX - uint64_t(n)) return cudaErrorInvalidValue;
    if (n == 0) return cudaSuccess;

    Update u{};
    u.constants = *constants;
    u.weight = weight;
    u.kept = kept;
    u.grad = grad;
    u.exp_avg = exp_avg;
    u.exp_avg_sq = exp_avg_sq;
    u.max_exp_avg_sq = max_exp_avg_sq;
    u.n = uint64_t(n);
    u.first = first;
    u.noise_key = noise_key;
    u.grad_scale = grad_scale;

    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    switch (weight_kind) {
    case OUTBOARD_CUDA_WEIGHT_F32: return with_grad<Plain>(grad_kind, moment_kind, u, on);
    case OUTBOARD_CUDA_WEIGHT_BF16_SPLIT: return with_grad<SplitBf16>(grad_kind, moment_kind, u, on);
    case OUTBOARD_CUDA_WEIGHT_BF16_FULL: return with_grad<FullBf16>(grad_kind, moment_kind, u, on);
    default: return with_grad<FullF16>(grad_kind, moment_kind, u, on);
    }
}
