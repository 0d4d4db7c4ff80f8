// Copies: one by the device's copy engines, or many small ones with one launch.

#include "dtypes.cuh"
#include "launch.cuh"

static_assert(sizeof(outboard_cuda_copy) == 24, "src/cuda/sys.rs asserts the same of Copy");
static_assert(offsetof(outboard_cuda_copy, to) == 0, "");
static_assert(offsetof(outboard_cuda_copy, from) == 8, "");
static_assert(offsetof(outboard_cuda_copy, bytes) == 16, "");

namespace outboard {
namespace {

constexpr int THREADS = 256;
constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;
constexpr int TOGETHER = 4;                     // words that a thread has under way at once
constexpr uint64_t TILE = 16 * WARP * TOGETHER; // bytes
// What these have under way, half a MiB, is several times what the bus delivers in the time of one trip across it.
constexpr uint64_t MOST_BLOCKS = 32;

// An item of the table. Tiles begin `head` bytes in, where words are aligned on both sides; the first and the last tile
// have what is before and behind, too.
struct Piece {
    char *to;
    const char *from;
    uint64_t bytes;
    uint32_t first_tile;
    uint32_t tiles;
    uint32_t head;
    uint32_t word; // 16, 8, 4 or 2 bytes
};

// Whole words between two offsets, by a warp.
template <class Word>
__device__ void copy_words(char *to, const char *from, uint64_t begin, uint64_t end) {
    constexpr uint64_t STRIDE = sizeof(Word) * WARP;
    for (uint64_t at = begin + sizeof(Word) * (threadIdx.x % WARP); at < end; at += STRIDE * TOGETHER) {
        Word words[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (at + i * STRIDE < end) words[i] = *reinterpret_cast<const Word *>(from + at + i * STRIDE);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (at + i * STRIDE < end) *reinterpret_cast<Word *>(to + at + i * STRIDE) = words[i];
        }
    }
}

// Any bytes between two offsets; `begin` is even.
__device__ void copy_bytes(const Piece &piece, uint64_t begin, uint64_t end) {
    const uint64_t even = begin + (end - begin) / 2 * 2;
    copy_words<uint16_t>(piece.to, piece.from, begin, even);
    if (even < end && threadIdx.x % WARP == 0) piece.to[even] = piece.from[even];
}

// Each warp has a run of tiles, so that many small pieces are under way at once.
__global__ void __launch_bounds__(THREADS)
    copy_many(const __grid_constant__ Lookup lookup, const Piece *__restrict__ table) {
    const uint32_t warp = blockIdx.x * WARPS + threadIdx.x / WARP;
    uint32_t tile = part_begin(lookup, warp, gridDim.x * WARPS);
    const uint32_t last = part_begin(lookup, warp + 1, gridDim.x * WARPS);
    if (tile == last) return;
    for (uint32_t item = find(lookup, table, tile); tile < last; ++item) {
        const Piece piece = table[item];
        const uint32_t next = min(last, piece.first_tile + piece.tiles);
        const bool is_start = tile == piece.first_tile;
        const bool is_end = next == piece.first_tile + piece.tiles;
        const uint64_t begin = piece.head + (tile - piece.first_tile) * TILE;
        const uint64_t end = is_end ? piece.bytes : piece.head + (next - piece.first_tile) * TILE;
        // In words from `begin` to here.
        const uint64_t words_end = begin + (end - begin) / piece.word * piece.word;
        if (is_start) copy_bytes(piece, 0, piece.head);
        switch (piece.word) {
        case 16: copy_words<uint4>(piece.to, piece.from, begin, words_end); break;
        case 8: copy_words<uint64_t>(piece.to, piece.from, begin, words_end); break;
        case 4: copy_words<uint32_t>(piece.to, piece.from, begin, words_end); break;
        default: copy_words<uint16_t>(piece.to, piece.from, begin, words_end); break;
        }
        copy_bytes(piece, words_end, end);
        tile = next;
    }
}

Piece piece_of(const outboard_cuda_copy &copy) {
    Piece piece{};
    piece.to = static_cast<char *>(copy.to);
    piece.from = static_cast<const char *>(copy.from);
    piece.bytes = copy.bytes;
    // The largest word to which both sides can be aligned at once.
    const uintptr_t to = reinterpret_cast<uintptr_t>(copy.to), from = reinterpret_cast<uintptr_t>(copy.from);
    piece.word = 16;
    while ((to - from) % piece.word != 0) piece.word /= 2;
    const uint64_t head = (piece.word - to % piece.word) % piece.word;
    piece.head = uint32_t(head < copy.bytes ? head : copy.bytes);
    return piece;
}

} // namespace
} // namespace outboard

extern "C" int outboard_cuda_copy_many(int device, void *table, uint64_t table_bytes, const outboard_cuda_copy *copies,
                                       uint64_t count, void *stream) {
    using namespace outboard;
    if (copies == nullptr && count > 0) return cudaErrorInvalidValue;
    Table<Piece> pieces(table, table_bytes, count);
    for (uint64_t i = 0; i < count; ++i) {
        if (copies[i].bytes == 0) continue;
        if (!is_plane(copies[i].to, 2) || !is_plane(copies[i].from, 2)) return cudaErrorInvalidValue;
        const Piece piece = piece_of(copies[i]);
        const uint64_t body = piece.bytes - piece.head;
        // One tile for a head without a body.
        const uint64_t tiles = body > TILE ? body / TILE + (body % TILE != 0) : 1;
        if (!pieces.add(piece, tiles)) return cudaErrorInvalidValue;
    }
    if (pieces.is_empty()) return cudaSuccess;

    const Call call(device, stream);
    if (call.error != cudaSuccess) return call.error;
    void *mapped;
    const cudaError_t error = as_mapped(call, table, &mapped);
    if (error != cudaSuccess) return error;
    Lookup lookup = pieces.lookup();
    void *arguments[] = {&lookup, &mapped};
    const auto kernel = reinterpret_cast<const void *>(&copy_many);
    const uint64_t wanted = (uint64_t(lookup.tiles) + WARPS - 1) / WARPS;
    return launch(kernel, grid(wanted, MOST_BLOCKS), THREADS, arguments, stream);
}

extern "C" int outboard_cuda_copy_async(int device, int direction, void *to, const void *from, uint64_t bytes,
                                        void *stream) {
    cudaMemcpyKind kind;
    switch (direction) {
    case OUTBOARD_CUDA_TO_DEVICE: kind = cudaMemcpyHostToDevice; break;
    case OUTBOARD_CUDA_TO_HOST: kind = cudaMemcpyDeviceToHost; break;
    default: return cudaErrorInvalidValue;
    }
    if (bytes == 0) return cudaSuccess;
    const outboard::Call call(device, stream);
    if (call.error != cudaSuccess) return call.error;
    return cudaMemcpyAsync(to, from, bytes, kind, static_cast<cudaStream_t>(stream));
}
