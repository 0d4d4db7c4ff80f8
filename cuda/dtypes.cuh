// Dtypes on the device: how each is stored, and how it makes an fp32 value and back. The functions have the names, and
// give the bits, that they have on the CPU, in src/kernel/convert.rs and master.rs.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace outboard {

// ---- Conversions ----------------------------------------------------------------------------------------------------

inline __device__ bool is_nan(float value) { return (__float_as_uint(value) & 0x7FFFFFFF) > 0x7F800000; }

inline __device__ float bf16_to_f32(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }

inline __device__ uint16_t f32_to_bf16(float value) {
    const uint32_t bits = __float_as_uint(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return is_nan(value) ? 0x7FC0 : uint16_t(rounded);
}

inline __device__ uint16_t f32_to_bf16_stochastic(float value, uint32_t noise) {
    const uint32_t bits = __float_as_uint(value);
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude >= 0x7F800000) return magnitude > 0x7F800000 ? 0x7FC0 : uint16_t(bits >> 16);
    return uint16_t((bits + (noise & 0xFFFF)) >> 16);
}

inline __device__ float f16_to_f32(uint16_t bits) {
    const uint32_t sign = (uint32_t(bits) & 0x8000) << 16;
    const uint32_t magnitude = uint32_t(bits) & 0x7FFF;
    const float finite = __fmul_rn(__uint_as_float(magnitude << 13), __uint_as_float(0x77800000)); // times 2^112
    const uint32_t special = (magnitude << 13) | 0x7F800000;
    return __uint_as_float(sign | (magnitude >= 0x7C00 ? special : __float_as_uint(finite)));
}

inline __device__ uint16_t f32_to_f16(float value) {
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

// ---- Dtypes ---------------------------------------------------------------------------------------------------------

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
    static __device__ uint16_t store_nearest(float value) { return f32_to_f16(value); }
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

// ---- Planes ---------------------------------------------------------------------------------------------------------

// N elements that are read and written together, 16 bytes at a time where there are as many.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T at[N];
};

template <int N, class T>
inline __device__ Pack<T, N> read(const void *plane, uint64_t at) {
    return *reinterpret_cast<const Pack<T, N> *>(static_cast<const T *>(plane) + at);
}

template <int N, class T>
inline __device__ void write(void *plane, uint64_t at, const Pack<T, N> &pack) {
    *reinterpret_cast<Pack<T, N> *>(static_cast<T *>(plane) + at) = pack;
}

} // namespace outboard
