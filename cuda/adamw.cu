// The launches of the recipe (recipe.cuh): for one run, and for many at once.

#include "launch.cuh"
#include "recipe.cuh"

// src/cuda/mod.rs and src/cuda/sys.rs assert the same of their sides.
static_assert(sizeof(outboard_cuda_constants) == 40, "");
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
static_assert(sizeof(outboard_cuda_update) == 120, "");
static_assert(offsetof(outboard_cuda_update, weight) == 40, "");
static_assert(offsetof(outboard_cuda_update, kept) == 48, "");
static_assert(offsetof(outboard_cuda_update, grad) == 56, "");
static_assert(offsetof(outboard_cuda_update, exp_avg) == 64, "");
static_assert(offsetof(outboard_cuda_update, exp_avg_sq) == 72, "");
static_assert(offsetof(outboard_cuda_update, max_exp_avg_sq) == 80, "");
static_assert(offsetof(outboard_cuda_update, n) == 88, "");
static_assert(offsetof(outboard_cuda_update, first) == 96, "");
static_assert(offsetof(outboard_cuda_update, noise_key) == 104, "");
static_assert(offsetof(outboard_cuda_update, grad_scale) == 112, "");

namespace outboard {
namespace {

constexpr int THREADS = 256;
constexpr uint64_t TILE = 8 * THREADS; // elements; each thread has one vector

// An item of a table.
struct Segment {
    Update update;
    uint32_t first_tile;
    uint32_t tiles;
};

// ---- The kernels ----------------------------------------------------------------------------------------------------

template <class Weight, class Grad, class Moment>
__global__ void __launch_bounds__(THREADS) adamw(const __grid_constant__ Update u) {
    const uint64_t thread = uint64_t(blockIdx.x) * THREADS + threadIdx.x;
    update_range<Weight, Grad, Moment>(u, 0, u.n, thread, uint64_t(gridDim.x) * THREADS);
}

template <class Weight, class Grad, class Moment>
__global__ void __launch_bounds__(THREADS)
    adamw_many(const __grid_constant__ Lookup lookup, const Segment *__restrict__ table) {
    // Read from the table by all threads together, a word each: one trip across the bus.
    using Word = uint64_t;
    constexpr int WORDS = sizeof(Segment) / sizeof(Word);
    static_assert(sizeof(Segment) % sizeof(Word) == 0 && WORDS <= THREADS, "");
    __shared__ Segment segment;

    uint32_t tile = part_begin(lookup, blockIdx.x, gridDim.x);
    const uint32_t end = part_begin(lookup, blockIdx.x + 1, gridDim.x);
    if (tile == end) return;
    for (uint32_t item = find(lookup, table, tile); tile < end; ++item) {
        __syncthreads(); // the last segment is no longer needed
        if (threadIdx.x < WORDS) {
            reinterpret_cast<Word *>(&segment)[threadIdx.x] = reinterpret_cast<const Word *>(&table[item])[threadIdx.x];
        }
        __syncthreads();
        const uint32_t next = min(end, segment.first_tile + segment.tiles);
        const uint64_t from = (tile - segment.first_tile) * TILE;
        const uint64_t to = min(segment.update.n, (next - segment.first_tile) * TILE);
        update_range<Weight, Grad, Moment>(segment.update, from, to, threadIdx.x, THREADS);
        tile = next;
    }
}

// ---- The launches ---------------------------------------------------------------------------------------------------

// What does not depend on the dtypes.
bool is_run(const outboard_cuda_update &given) {
    return given.n <= INT64_MAX && given.first <= UINT64_MAX - given.n;
}

// Completes a run. False if a plane is missing or misaligned.
template <class Weight, class Grad, class Moment>
bool complete(const outboard_cuda_update &given, Update *u) {
    static_cast<outboard_cuda_update &>(*u) = given;
    u->noise_stream = noise_stream(given.noise_key, given.first);
    u->aligned = 1;
    bool valid = true;
    const auto plane = [&](const void *pointer, size_t element) {
        valid = valid && is_plane(pointer, element);
        if (!is_aligned(pointer, 16)) u->aligned = 0;
    };
    plane(u->weight, sizeof(typename Weight::Live));
    if (Weight::HAS_KEPT) plane(u->kept, sizeof(typename Weight::Kept));
    plane(u->grad, sizeof(typename Grad::Stored));
    plane(u->exp_avg, sizeof(typename Moment::Stored));
    plane(u->exp_avg_sq, sizeof(typename Moment::Stored));
    if (u->max_exp_avg_sq != nullptr) plane(u->max_exp_avg_sq, sizeof(typename Moment::Stored));
    return valid;
}

// One run.
struct Single {
    int device;
    const outboard_cuda_update *update;
    uint32_t per_processor;
    void *stream;

    template <class Weight, class Grad, class Moment>
    cudaError_t run() const {
        if (!is_run(*update)) return cudaErrorInvalidValue;
        if (update->n == 0) return cudaSuccess;
        Update u{};
        if (!complete<Weight, Grad, Moment>(*update, &u)) return cudaErrorInvalidValue;

        const Call call(device, stream);
        if (call.error != cudaSuccess) return call.error;
        static PerDevice known;
        const auto kernel = reinterpret_cast<const void *>(&adamw<Weight, Grad, Moment>);
        int resident;
        const cudaError_t error = resident_blocks(call, kernel, THREADS, known, &resident);
        if (error != cudaSuccess) return error;
        // As many blocks as the device can hold at once, or as were asked for; they stride over what is more.
        uint64_t most = uint64_t(resident);
        int processors = 1;
        if (per_processor != 0) {
            const cudaError_t counted = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, call.device);
            if (counted != cudaSuccess) return counted;
            const uint64_t asked = uint64_t(per_processor) * uint64_t(processors);
            if (asked < most) most = asked;
        }
        void *arguments[] = {&u};
        return launch(kernel, grid((u.n + THREADS - 1) / THREADS, most), THREADS, arguments, stream);
    }
};

// Many runs.
struct Many {
    int device;
    void *table;
    uint64_t table_bytes;
    const outboard_cuda_update *updates;
    uint64_t count;
    uint64_t *refused;
    void *stream;

    template <class Weight, class Grad, class Moment>
    cudaError_t run() const {
        Table<Segment> segments(table, table_bytes, count);
        for (uint64_t i = 0; i < count; ++i) {
            *refused = i;
            if (!is_run(updates[i])) return cudaErrorInvalidValue;
            if (updates[i].n == 0) continue;
            Segment segment{};
            if (!complete<Weight, Grad, Moment>(updates[i], &segment.update)) return cudaErrorInvalidValue;
            *refused = count;
            if (!segments.add(segment, (updates[i].n + TILE - 1) / TILE)) return cudaErrorInvalidValue;
        }
        *refused = count;
        if (segments.is_empty()) return cudaSuccess;

        const Call call(device, stream);
        if (call.error != cudaSuccess) return call.error;
        static PerDevice known;
        const auto kernel = reinterpret_cast<const void *>(&adamw_many<Weight, Grad, Moment>);
        int resident;
        cudaError_t error = resident_blocks(call, kernel, THREADS, known, &resident);
        if (error != cudaSuccess) return error;
        void *mapped;
        error = as_mapped(call, table, &mapped);
        if (error != cudaSuccess) return error;
        Lookup lookup = segments.lookup();
        void *arguments[] = {&lookup, &mapped};
        return launch(kernel, grid(lookup.tiles, uint64_t(resident)), THREADS, arguments, stream);
    }
};

// ---- From kinds to types --------------------------------------------------------------------------------------------

template <class Weight, class Grad, class Action>
cudaError_t with_moment(int moment_kind, const Action &action) {
    switch (moment_kind) {
    case OUTBOARD_CUDA_MOMENT_F32: return action.template run<Weight, Grad, F32>();
    case OUTBOARD_CUDA_MOMENT_BF16: return action.template run<Weight, Grad, Bf16>();
    default: return cudaErrorInvalidValue;
    }
}

template <class Weight, class Action>
cudaError_t with_grad(int grad_kind, int moment_kind, const Action &action) {
    switch (grad_kind) {
    case OUTBOARD_CUDA_GRAD_F32: return with_moment<Weight, F32>(moment_kind, action);
    case OUTBOARD_CUDA_GRAD_BF16: return with_moment<Weight, Bf16>(moment_kind, action);
    case OUTBOARD_CUDA_GRAD_F16: return with_moment<Weight, F16>(moment_kind, action);
    default: return cudaErrorInvalidValue;
    }
}

template <class Action>
cudaError_t with_weight(int weight_kind, int grad_kind, int moment_kind, const Action &action) {
    switch (weight_kind) {
    case OUTBOARD_CUDA_WEIGHT_F32: return with_grad<Plain>(grad_kind, moment_kind, action);
    case OUTBOARD_CUDA_WEIGHT_BF16_SPLIT: return with_grad<SplitBf16>(grad_kind, moment_kind, action);
    case OUTBOARD_CUDA_WEIGHT_BF16_FULL: return with_grad<FullBf16>(grad_kind, moment_kind, action);
    case OUTBOARD_CUDA_WEIGHT_F16_FULL: return with_grad<FullF16>(grad_kind, moment_kind, action);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace
} // namespace outboard

extern "C" int outboard_cuda_adamw(int device, int weight_kind, int grad_kind, int moment_kind,
                                   const outboard_cuda_update *update, uint32_t per_processor, void *stream) {
    if (update == nullptr) return cudaErrorInvalidValue;
    const outboard::Single single{device, update, per_processor, stream};
    return outboard::with_weight(weight_kind, grad_kind, moment_kind, single);
}

extern "C" int outboard_cuda_adamw_many(int device, int weight_kind, int grad_kind, int moment_kind, void *table,
                                        uint64_t table_bytes, const outboard_cuda_update *updates, uint64_t count,
                                        uint64_t *refused, void *stream) {
    *refused = count;
    if (updates == nullptr && count > 0) return cudaErrorInvalidValue;
    const outboard::Many many{device, table, table_bytes, updates, count, refused, stream};
    return outboard::with_weight(weight_kind, grad_kind, moment_kind, many);
}
