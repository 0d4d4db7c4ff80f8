// Threads, streams, events and memory: CUDA's own functions, on a given device.

#include "launch.cuh"

using outboard::Call;

// ---- Threads, streams and events ------------------------------------------------------------------------------------

extern "C" int outboard_cuda_enter_thread(int device) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess) return error;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    return cudaThreadExchangeStreamCaptureMode(&mode);
}

extern "C" int outboard_cuda_current_device(int *device) { return cudaGetDevice(device); }

extern "C" int outboard_cuda_stream_create(int device, int high_priority, void **stream) {
    const Call call(device);
    if (call.error != cudaSuccess) return call.error;
    int lowest, highest;
    const cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    if (error != cudaSuccess) return error;
    cudaStream_t made;
    const int priority = high_priority != 0 ? highest : lowest;
    const cudaError_t creation = cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, priority);
    if (creation == cudaSuccess) *stream = made;
    return creation;
}

extern "C" int outboard_cuda_stream_destroy(int device, void *stream) {
    const Call call(device);
    return call.error != cudaSuccess ? call.error : cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}

extern "C" int outboard_cuda_event_create(int device, void **event) {
    const Call call(device);
    if (call.error != cudaSuccess) return call.error;
    cudaEvent_t made;
    const cudaError_t error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    if (error == cudaSuccess) *event = made;
    return error;
}

extern "C" int outboard_cuda_event_destroy(int device, void *event) {
    const Call call(device);
    return call.error != cudaSuccess ? call.error : cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

extern "C" int outboard_cuda_event_record(int device, void *event, void *stream) {
    const Call call(device, stream, Call::AnyMode());
    if (call.error != cudaSuccess) return call.error;
    return cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream));
}

extern "C" int outboard_cuda_event_query(int device, void *event, int *done) {
    const Call call(device);
    if (call.error != cudaSuccess) return call.error;
    const cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(event));
    *done = error == cudaSuccess;
    return error == cudaErrorNotReady ? cudaSuccess : error;
}

extern "C" int outboard_cuda_stream_wait_event(int device, void *stream, void *event) {
    const Call call(device, stream, Call::AnyMode());
    if (call.error != cudaSuccess) return call.error;
    return cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0);
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

extern "C" int outboard_cuda_host_register(int device, void *start, uint64_t bytes) {
    const Call call(device);
    if (call.error != cudaSuccess) return call.error;
    return cudaHostRegister(start, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
}

extern "C" int outboard_cuda_host_unregister(int device, void *start) {
    const Call call(device);
    return call.error != cudaSuccess ? call.error : cudaHostUnregister(start);
}

extern "C" int outboard_cuda_malloc(int device, uint64_t bytes, void **memory) {
    const Call call(device);
    return call.error != cudaSuccess ? call.error : cudaMalloc(memory, bytes);
}

extern "C" int outboard_cuda_free(int device, void *memory) {
    const Call call(device);
    return call.error != cudaSuccess ? call.error : cudaFree(memory);
}

extern "C" int outboard_cuda_can_address_host(int device, int *answer) {
    const Call call(device);
    if (call.error != cudaSuccess) return call.error;
    bool can = false;
    const cudaError_t error = outboard::can_address_host(call, &can);
    *answer = can;
    return error;
}
