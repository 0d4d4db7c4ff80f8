// AdamW and Adam for one run of elements, on the device: the recipe of src/kernel/recipe.rs, with the same bits.
//
// That file is the reference on the CPU, and the tests in src/cuda compare the two for every combination of dtypes. In
// words, all in fp32 and correctly rounded, fused only where it says fma:
//
//     g = gradient_factor * (grad / grad_scale)                     [Adam: g = fma(p, coupled_decay, g)]
//     m = fma(lerp_factor, g - m, m)                                [or + g: lerp from the gradient's end]
//     v = fma(one_minus_beta2 * g, g, beta2 * v)                    [amsgrad: the root is that of max(max, v)]
//     p = p * decay_factor - (step_size * m) / (sqrt(v) / bias_correction2_sqrt + eps)
//
// Every operation is spelt as an intrinsic that names its rounding, since the compiler may contract a plain a * b + c
// into an fma. Nothing here may be compiled with fast math or flush-to-zero.
//
// The kernels are bound by memory wherever the planes live, so this is written to be read: one body for vectors and
// single elements, for one run and for many, amsgrad and the scale tested at run time.
#pragma once

#include "dtypes.cuh"
#include "outboard_cuda.h"

namespace outboard {

// A run as the kernels take it: what the caller said, and what follows from that for all its elements.
struct Update : outboard_cuda_update {
    uint32_t noise_stream; // the stream of element `first`
    uint32_t aligned;      // every plane, to 16 bytes
};

// ---- Noise, as in src/kernel/noise.rs -------------------------------------------------------------------------------

inline __host__ __device__ uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// The key for the 2^32 elements around `index`.
inline __host__ __device__ uint32_t noise_stream(uint64_t key, uint64_t index) {
    const uint64_t mixed = mix64(key ^ (index >> 32));
    return uint32_t(mixed ^ (mixed >> 32));
}

inline __device__ uint32_t hash32(uint32_t stream, uint32_t low) {
    uint32_t x = (low * 0x9E3779B1u) ^ stream;
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

// ---- The recipe -----------------------------------------------------------------------------------------------------

// Elements `at` to `at + N`. For N > 1 all planes are aligned to 16 bytes, and `at` is a multiple of N.
template <class Weight, class Grad, class Moment, int N>
inline __device__ void update(const Update &u, uint64_t at) {
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

// Elements `begin` to `end` of a run, shared out between `threads` threads, of which this is number `thread`. `begin`
// is a multiple of 8, and so is `end` unless it is the run's.
template <class Weight, class Grad, class Moment>
inline __device__ void update_range(const Update &u, uint64_t begin, uint64_t end, uint64_t thread, uint64_t threads) {
    // The narrowest plane gets one 16-byte access, wider ones two.
    constexpr int WIDTH = 4;

    uint64_t singles = begin;
    if (u.aligned) {
        singles = end / WIDTH * WIDTH;
        for (uint64_t at = begin + thread * WIDTH; at < singles; at += threads * WIDTH) {
            update<Weight, Grad, Moment, WIDTH>(u, at);
        }
    }
    for (uint64_t at = singles + thread; at < end; at += threads) update<Weight, Grad, Moment, 1>(u, at);
}

} // namespace outboard
