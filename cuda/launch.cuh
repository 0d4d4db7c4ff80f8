// What every call into the library shares: the device it is for, the size of a launch, and the tables of launches that
// work on many items.
#pragma once

#include "outboard_cuda.h"

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

namespace outboard {

// ---- The device of a call -------------------------------------------------------------------------------------------

// While it lives, `device` is the current device, and no call is refused because of a capture elsewhere (nor ends it):
// what is done here is ordered by our own streams and events, never by the captured work.
class Call {
  public:
    explicit Call(int ordinal) {
        select(ordinal);
        if (error != cudaSuccess) return;
        mode_ = cudaStreamCaptureModeRelaxed;
        error = cudaThreadExchangeStreamCaptureMode(&mode_);
        exchanged_ = error == cudaSuccess;
    }

    // For a call that gives work to `stream`, which is refused while that is being captured.
    Call(int ordinal, void *stream) : Call(ordinal) { refuse_capture(stream); }

    // As that, for what CUDA never refuses because of a capture elsewhere.
    struct AnyMode {};
    Call(int ordinal, void *stream, AnyMode) {
        select(ordinal);
        refuse_capture(stream);
    }

    Call(const Call &) = delete;
    Call &operator=(const Call &) = delete;

    ~Call() {
        // Both were fine a moment ago; there is nobody to tell.
        if (exchanged_) (void)cudaThreadExchangeStreamCaptureMode(&mode_);
        if (moved_) (void)cudaSetDevice(previous_);
    }

    cudaError_t error; // if not success, the call is over
    int device = -1;

  private:
    void select(int ordinal) {
        error = cudaGetDevice(&previous_);
        if (error != cudaSuccess) return;
        device = ordinal == OUTBOARD_CUDA_CURRENT_DEVICE ? previous_ : ordinal;
        if (device == previous_) return;
        error = cudaSetDevice(device);
        moved_ = error == cudaSuccess;
    }

    void refuse_capture(void *stream) {
        if (error != cudaSuccess) return;
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
        if (error == cudaSuccess && status != cudaStreamCaptureStatusNone) error = cudaErrorStreamCaptureUnsupported;
    }

    int previous_ = -1;
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
    bool moved_ = false;
    bool exchanged_ = false;
};

// ---- What does not change about a device ----------------------------------------------------------------------------

// A number known for each device once it was asked for. Static ones begin with zeros, so that no guard is needed;
// threads that ask at the same time store the same number.
class PerDevice {
  public:
    // The number, above 0, or 0 if it is not known yet.
    int get(int device) const { return kept(device) ? __atomic_load_n(&values_[device], __ATOMIC_RELAXED) : 0; }

    void set(int device, int value) {
        if (kept(device)) __atomic_store_n(&values_[device], value, __ATOMIC_RELAXED);
    }

  private:
    static constexpr int DEVICES = 64; // numbers of devices beyond are asked for each time
    static bool kept(int device) { return 0 <= device && device < DEVICES; }
    int values_[DEVICES];
};

// How many blocks of `kernel` the call's device can hold at once; `known` is that kernel's.
inline cudaError_t resident_blocks(const Call &call, const void *kernel, int threads, PerDevice &known, int *blocks) {
    *blocks = known.get(call.device);
    if (*blocks > 0) return cudaSuccess;
    int processors, per_processor;
    cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, call.device);
    if (error != cudaSuccess) return error;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, threads, 0);
    if (error != cudaSuccess) return error;
    *blocks = processors * per_processor;
    known.set(call.device, *blocks);
    return cudaSuccess;
}

// As many blocks as there is work for, and at most `most`.
inline dim3 grid(uint64_t wanted, uint64_t most) { return dim3(uint32_t(wanted < most ? wanted : most)); }

// Unlike <<<>>>, this returns the launch's own error.
inline cudaError_t launch(const void *kernel, dim3 blocks, int threads, void **arguments, void *stream) {
    return cudaLaunchKernel(kernel, blocks, dim3(uint32_t(threads)), arguments, 0, static_cast<cudaStream_t>(stream));
}

// ---- Addresses ------------------------------------------------------------------------------------------------------

inline bool is_aligned(const void *pointer, size_t to) { return reinterpret_cast<uintptr_t>(pointer) % to == 0; }

// Whether memory is there and aligned to its elements.
inline bool is_plane(const void *pointer, size_t element) { return pointer != nullptr && is_aligned(pointer, element); }

inline cudaError_t can_address_host(const Call &call, bool *answer) {
    static PerDevice known; // 1 no, 2 yes
    int value = known.get(call.device);
    if (value == 0) {
        int can;
        const auto attribute = cudaDevAttrCanUseHostPointerForRegisteredMem;
        const cudaError_t error = cudaDeviceGetAttribute(&can, attribute, call.device);
        if (error != cudaSuccess) return error;
        value = can != 0 ? 2 : 1;
        known.set(call.device, value);
    }
    *answer = value == 2;
    return cudaSuccess;
}

// From [pinned] to [mapped].
template <class T>
inline cudaError_t as_mapped(const Call &call, T *pinned, T **mapped) {
    bool same = false;
    const cudaError_t error = can_address_host(call, &same);
    if (error != cudaSuccess) return error;
    *mapped = pinned;
    return same ? cudaSuccess : cudaHostGetDevicePointer(reinterpret_cast<void **>(mapped), pinned, 0);
}

// ---- Tables ---------------------------------------------------------------------------------------------------------

// The work on each item is cut into tiles, which are numbered through: item i has those from its `first_tile` to that
// of item i + 1. A kernel's blocks (or warps) each take one run of tiles, so that they seldom change from item to item:
// each change is a read across the bus.

// Finds the item of a tile. Passed by value, so that a search in a table of up to PIVOTS items reads nothing across the
// bus, and in a longer one little.
struct Lookup {
    static constexpr uint32_t PIVOTS = 512;
    uint32_t items;
    uint32_t stride; // `first_tile` has that of every stride-th item
    uint32_t tiles;  // of all items
    uint32_t first_tile[PIVOTS];
};

// The item of `tile`, which is one of them.
template <class Item>
inline __device__ uint32_t find(const Lookup &lookup, const Item *table, uint32_t tile) {
    uint32_t low = 0, high = (lookup.items + lookup.stride - 1) / lookup.stride;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (lookup.first_tile[middle] <= tile) low = middle;
        else high = middle;
    }
    low *= lookup.stride;
    high = min(low + lookup.stride, lookup.items);
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (table[middle].first_tile <= tile) low = middle;
        else high = middle;
    }
    return low;
}

// Where the run of tiles of number `part` of `parts` begins.
inline __device__ uint32_t part_begin(const Lookup &lookup, uint32_t part, uint32_t parts) {
    return uint32_t(uint64_t(lookup.tiles) * part / parts);
}

// Writes a table, on the host.
template <class Item>
class Table {
  public:
    static_assert(sizeof(Item) <= OUTBOARD_CUDA_TABLE_ENTRY_BYTES && alignof(Item) <= 16, "");

    Table(void *table, uint64_t bytes, uint64_t count)
        : items_(static_cast<Item *>(table)),
          fits_(is_plane(table, 16) && count <= bytes / OUTBOARD_CUDA_TABLE_ENTRY_BYTES && count <= INT32_MAX) {}

    // Adds an item of `tiles` tiles, more than 0. False if there is no room or there are too many tiles.
    bool add(Item item, uint64_t tiles) {
        if (!fits_ || tiles > UINT32_MAX - lookup_.tiles) return false;
        item.first_tile = lookup_.tiles;
        item.tiles = uint32_t(tiles);
        items_[lookup_.items++] = item;
        lookup_.tiles += uint32_t(tiles);
        return true;
    }

    bool is_empty() const { return lookup_.items == 0; }

    // The lookup for what has been added.
    const Lookup &lookup() {
        lookup_.stride = (lookup_.items + Lookup::PIVOTS - 1) / Lookup::PIVOTS;
        for (uint32_t i = 0; i * lookup_.stride < lookup_.items; ++i) {
            lookup_.first_tile[i] = items_[i * lookup_.stride].first_tile;
        }
        return lookup_;
    }

  private:
    Item *items_;
    bool fits_;
    Lookup lookup_{};
};

} // namespace outboard
